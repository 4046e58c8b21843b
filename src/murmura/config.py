"""DistributedConfig holds one rank's place in its world and how it connects to the others, validated as a whole.

One ConfigError lists all faults. This is the only module of the library that reads os.environ; LAUNCHERS lists the
launchers whose variables it understands, in order of precedence.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch

from murmura.errors import ConfigError
from murmura.types import DistributedBackend, DistributedRole, TransportKind, parse

__all__ = ["DistributedConfig", "DistributedTrainConfig", "parse_address"]

T = TypeVar("T")
DEFAULT_COORDINATOR = "127.0.0.1:29500"
ENUMS = {"role": DistributedRole, "backend": DistributedBackend, "transport": TransportKind}
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_RANGE = r"[0-9]+(?:-[0-9]+)?"
_FIRST_ENTRY = re.compile(rf"((?:[\w.-]|\[{_RANGE}(?:,{_RANGE})*\])+)(?:,.+)?")


def parse_address(address: str) -> tuple[str, int]:
    """Split "host:port"; the brackets of an IPv6 host are removed, as sockets expect."""
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:]+)):([0-9]{1,5})", address)
    if match:
        host, port = match[1] or match[2], int(match[3])
        if 1 <= port <= 65535 and _is_host(host, bracketed=match[1] is not None):
            return host, port
    raise ConfigError(
        f"coordinator_addr={address!r} is not host:port. Give rank 0's host (a name, an IPv4 address or an "
        "[IPv6] address in brackets), a colon, and a port from 1 to 65535."
    )


def _is_host(host: str, *, bracketed: bool) -> bool:
    if not bracketed and host.strip("0123456789."):
        return _HOST_NAME.fullmatch(host) is not None
    try:  # digits and dots alone are never a host name: 10.0.0.256 is a mistyped address
        return ipaddress.ip_address(host).version == (6 if bracketed else 4)
    except ValueError:
        return False


def expand_first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: node01 for "node[01-03,07],login5"."""
    match = _FIRST_ENTRY.fullmatch(nodelist)
    if not match:
        raise ConfigError(f"{nodelist!r} is not a list of hosts such as 'node[01-03,07],login5'. Correct it.")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[1])


def tasks_on_node(layout: str, node: int) -> int:
    """Return the number of tasks on the node of index `node`; the layout "2(x3),1" means 2, 2, 2, 1."""
    num_nodes = 0
    for entry in layout.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", entry)
        if not match:
            raise ConfigError(f"{layout!r} is not a list of tasks per node such as '2(x3),1'. Correct it.")
        num_nodes += int(match[2] or 1)
        if 0 <= node < num_nodes:
            return int(match[1])
    raise ConfigError(f"{layout!r} tells of {num_nodes} nodes, none of index {node}. Correct it or SLURM_NODEID.")


def slurm_port(job: str) -> int:
    """Return a port that is equal on all ranks of a job, and rarely that of another job on the host."""
    return 20000 + whole_number(job) % 40000


def whole_number(text: str) -> int:
    """Parse an integer like int(), but refuse "1_0" and digits of other scripts."""
    if re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
        return int(text)
    raise ConfigError(f"{text!r} is not an integer. Set it to one.")


def seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number. Set it to seconds.") from None


def role_of(rank: int) -> DistributedRole:
    return DistributedRole.COORDINATOR if rank == 0 else DistributedRole.WORKER


def find_faults(given: Mapping[str, Any]) -> list[str]:
    """Return the faults of the fields in `given`; a rule that needs an absent or faulty field is skipped."""
    return [*_place_faults(given), *_choice_faults(given), *_connection_faults(given)]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _place_faults(given: Mapping[str, Any]) -> Iterator[str]:
    places = {name: given[name] for name in ("world_size", "rank", "local_rank") if name in given}
    if given.get("local_world_size") is not None:
        places["local_world_size"] = given["local_world_size"]
    for name, value in places.items():
        if not _is_integer(value):
            yield f"{name}={value!r} is not an integer. Pass a whole number."
        elif name.endswith("size") and value < 1:
            yield f"{name}={value} is below 1. Count this rank in."
        elif value < 0:
            yield f"{name}={value} is negative. Count from 0."
    # A size below 1 is reported above; it counts as 1 here, so that it does not cause a second fault.
    limits = {name: max(value, 1) for name, value in places.items() if _is_integer(value)}
    for name, limit in (("rank", "world_size"), ("local_rank", "local_world_size")):
        if name in limits and limit in limits and places[name] >= limits[limit]:
            yield f"{name}={places[name]} is not below {limit}={places[limit]}. Count from 0 to {limit} - 1."
    if limits.get("local_world_size", 1) > limits.get("world_size", math.inf):
        yield (
            f"local_world_size={places['local_world_size']} is above world_size={places['world_size']}. "
            "It counts the ranks on this host alone: lower it, or raise world_size."
        )


def _choice_faults(given: Mapping[str, Any]) -> Iterator[str]:
    for name, enum in ENUMS.items():
        if name in given and not (name == "role" and given[name] is None):
            try:
                parse(enum, given[name], name)
            except ConfigError as unknown:
                yield str(unknown)
    role, rank = given.get("role"), given.get("rank")
    if role in list(DistributedRole) and _is_integer(rank) and role != role_of(given["rank"]):
        yield f"role={str(role)!r} contradicts rank={rank}. Rank 0 coordinates, the others work: omit role."
    if given.get("backend") == DistributedBackend.CUDA and not torch.cuda.is_available():
        yield "backend='cuda', but torch finds no CUDA device. Pass 'auto' or 'cpu', or check the driver."


def _connection_faults(given: Mapping[str, Any]) -> Iterator[str]:
    address = given.get("coordinator_addr", "")
    if not isinstance(address, str):
        yield f"coordinator_addr={address!r} is not a string. Pass 'host:port', or '' where nothing needs it."
    elif address:
        try:
            parse_address(address)
        except ConfigError as unparsable:
            yield str(unparsable)
    for name in ("algorithm", "job_id", "secret"):
        if not isinstance(value := given.get(name), str | None):
            shown = name if name == "secret" else f"{name}={value!r}"
            yield f"{shown} is of type {type(value).__name__}. Pass a string or None."
    timeout = given.get("timeout", 1.0)
    if not (_is_integer(timeout) or isinstance(timeout, float)) or not 0 < timeout <= sys.float_info.max:
        yield f"timeout={timeout!r} is not a finite number above 0. Pass seconds."


def raise_faults(faults: list[str], where: str) -> None:
    if faults:
        head = f"{where} has {len(faults)} fault{'s' if len(faults) > 1 else ''}:"
        raise ConfigError("\n  - ".join([head, *faults]))


# The environment. If several variables may hold a value, the first that is set is used.

Sources = Mapping[str, Callable[[str], T]]  # parsers, by variable


def integers(**variables: str) -> Mapping[str, Sources[int]]:
    return {name: dict.fromkeys(names.split(), whole_number) for name, names in variables.items()}


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The variables in which one launcher gives a rank its place; `required` and `optional` are by field."""

    name: str
    signs: tuple[str, ...]  # if any of them is set, this launcher started the process
    required: Mapping[str, Sources[int]]
    optional: Mapping[str, Sources[int]] = field(default_factory=dict)
    host: Sources[str] = field(default_factory=lambda: {"MASTER_ADDR": str})
    port: Sources[int] = field(default_factory=lambda: {"MASTER_PORT": whole_number})
    job: tuple[str, ...] = ()  # variables that together identify the job; the first is necessary


TORCHRUN = Launcher(
    name="torchrun",
    signs=("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    required=integers(rank="RANK", world_size="WORLD_SIZE"),
    optional=integers(local_rank="LOCAL_RANK", local_world_size="LOCAL_WORLD_SIZE"),
    job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
)
OPEN_MPI = Launcher(
    name="Open MPI",
    signs=tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    required=integers(
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    job=("PMIX_NAMESPACE",),
)
MPICH = Launcher(
    name="MPICH",
    signs=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    required=integers(
        rank="PMI_RANK", world_size="PMI_SIZE", local_rank="MPI_LOCALRANKID", local_world_size="MPI_LOCALNRANKS"
    ),
)
SLURM = Launcher(
    name="SLURM",
    signs=("SLURM_STEP_ID",),
    required=integers(rank="SLURM_PROCID", world_size="SLURM_STEP_NUM_TASKS SLURM_NTASKS", local_rank="SLURM_LOCALID"),
    host={"MASTER_ADDR": str, "SLURM_STEP_NODELIST": expand_first_host, "SLURM_JOB_NODELIST": expand_first_host},
    port={"MASTER_PORT": whole_number, "SLURM_JOB_ID": slurm_port},
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
PMI = Launcher(name="PMI", signs=("PMI_RANK", "PMI_SIZE"), required=integers(rank="PMI_RANK", world_size="PMI_SIZE"))
# Inner launchers first: srun starts torchrun and mpiexec, and may set PMI_RANK for its own tasks.
LAUNCHERS = (TORCHRUN, OPEN_MPI, MPICH, SLURM, PMI)

SLURM_LAYOUTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
# slurm.h: the step ids of an interactive shell, a batch script, the external container and a pending step.
SLURM_NO_STEP = {str(number) for number in range(0xFFFFFFFA, 0xFFFFFFFE)}


def find_launcher(env: Mapping[str, str]) -> Launcher | None:
    for launcher in LAUNCHERS:
        if any(name in env for name in launcher.signs):
            return launcher
    # With another launcher these two only give the address; alone they are an incomplete set of torchrun's.
    return TORCHRUN if "MASTER_ADDR" in env or "MASTER_PORT" in env else None


class Variables:
    """The variables that are set and not empty, and the faults found in reading them."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = {name: value for name, value in env.items() if value.strip()}
        if self.env.get("SLURM_STEP_ID") in SLURM_NO_STEP:
            del self.env["SLURM_STEP_ID"]
        self.faults: list[str] = []
        self.missing: list[str] = []

    def read(self, sources: Sources[T], *, required: bool = False) -> T | None:
        for name in sources:
            if name in self.env:
                try:
                    return sources[name](self.env[name])
                except ConfigError as malformed:
                    self.faults.append(f"{name}={malformed}")
                    return None
        if required:
            self.missing.append(" or ".join(sources))
        return None


def read_launcher(variables: Variables, launcher: Launcher) -> dict[str, Any]:
    """Return the fields that the launcher sets, None for the others; faults are added to `variables`."""
    env = variables.env
    place = {name: variables.read(sources, required=True) for name, sources in launcher.required.items()}
    place |= {name: variables.read(sources) for name, sources in launcher.optional.items()}
    if launcher is SLURM and any(name in env for name in SLURM_LAYOUTS):
        node = variables.read({"SLURM_NODEID": whole_number}, required=True)
        if node is not None:
            layouts = dict.fromkeys(SLURM_LAYOUTS, lambda layout: tasks_on_node(layout, node))
            place["local_world_size"] = variables.read(layouts)
    address = _read_address(variables, launcher, place)
    if variables.missing:
        sources = [*launcher.required.values(), *launcher.optional.values(), launcher.host, launcher.port]
        known = dict.fromkeys([*launcher.signs, *(name for source in sources for name in source)])
        variables.faults.append(
            f"{launcher.name}'s variables are incomplete. Found: {', '.join(n for n in known if n in env)}. "
            f"Missing: {', '.join(variables.missing)}. Set what is missing, or unset what was found."
        )
    return {**place, "coordinator_addr": address, "job_id": _job_identity(env, launcher, address)}


def _read_address(variables: Variables, launcher: Launcher, place: Mapping[str, int | None]) -> str | None:
    """Return the coordinator's address; only a world on several hosts needs its variables."""
    is_one_host = place["world_size"] is not None and place["world_size"] in (1, place.get("local_world_size"))
    is_given = any(name in variables.env for name in (*launcher.host, *launcher.port))
    required = not is_one_host and (is_given or _sizes_are_known(variables, launcher, place))
    host = variables.read(launcher.host, required=required)
    port = variables.read(launcher.port, required=required)
    if is_one_host:
        default_host, default_port = parse_address(DEFAULT_COORDINATOR)
        host, port = host or default_host, default_port if port is None else port
    if host is None or port is None:
        return None
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _sizes_are_known(variables: Variables, launcher: Launcher, place: Mapping[str, int | None]) -> bool:
    """Whether the sizes tell if there are several hosts; they do not if one is missing or malformed, a fault itself."""
    names = launcher.optional.get("local_world_size", {})
    is_expected = "local_world_size" in launcher.required or any(name in variables.env for name in names)
    return place["world_size"] is not None and (place.get("local_world_size") is not None or not is_expected)


def _job_identity(env: Mapping[str, str], launcher: Launcher, address: str | None) -> str | None:
    parts = [env[name] for name in launcher.job if name in env]
    if not parts or launcher.job[0] not in env:
        return None
    if launcher is TORCHRUN and parts[0] == "none":  # torchrun's name for every job with a static rendezvous
        parts[0] = address or DEFAULT_COORDINATOR
    return ".".join(parts)


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """One rank's place in its world, and how it connects; strings are accepted for enums.

    Attributes:
        world_size: the number of ranks.
        rank: the number of this rank, from 0.
        local_rank: the number of this rank on its host, from 0.
        local_world_size: the number of ranks on this host, if known.
        role: derived from the rank; if given, it must agree.
        coordinator_addr: "host:port" of rank 0's rendezvous, the port required; "" if none is needed.
        backend: where this rank computes.
        transport: how tensors travel.
        algorithm: the name of the algorithm that DDP uses by default.
        job_id: distinguishes this job from others on the same hosts; equal on all its ranks.
        secret: shared by the ranks of the job; never shown in a repr or an error.
        timeout: seconds after which a wait for another rank fails.
    """

    world_size: int
    rank: int
    local_rank: int = 0
    local_world_size: int | None = None
    role: DistributedRole = None  # type: ignore[assignment]  # set below
    coordinator_addr: str = DEFAULT_COORDINATOR
    backend: DistributedBackend = DistributedBackend.AUTO
    transport: TransportKind = TransportKind.AUTO
    algorithm: str | None = None
    job_id: str | None = None
    secret: str | None = field(default=None, repr=False)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        raise_faults(find_faults(vars(self)), "DistributedConfig")
        values = {
            "role": role_of(self.rank),
            "backend": DistributedBackend(self.backend),
            "transport": TransportKind(self.transport),
            "timeout": float(self.timeout),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """Read the variables of torchrun, Open MPI, MPICH or SLURM (inside a step), and the MURMURA_ variables.

        Without any launcher's variables it is a world of one; if some are missing, a ConfigError names them.
        MURMURA_ALGORITHM, _TRANSPORT, _JOB_ID, _SECRET and _TIMEOUT set the fields of those names, _DEVICE `backend`.
        """
        variables = Variables(os.environ if env is None else env)
        launcher = find_launcher(variables.env)
        values: dict[str, Any] = {"world_size": 1, "rank": 0}
        if launcher:
            values = read_launcher(variables, launcher)
        for name in ("algorithm", "transport", "job_id", "secret"):
            values[name] = variables.read({f"MURMURA_{name.upper()}": str}) or values.get(name)
        values["backend"] = variables.read({"MURMURA_DEVICE": str})
        values["timeout"] = variables.read({"MURMURA_TIMEOUT": seconds})
        values = {name: value for name, value in values.items() if value is not None}
        where = f"the environment ({launcher.name})" if launcher else "the environment"
        raise_faults([*variables.faults, *find_faults(values)], where)
        return cls(**values)

    @property
    def coordinator_host(self) -> str:
        """The host of `coordinator_addr`, without the brackets of IPv6; a ConfigError if that is ""."""
        return parse_address(self.coordinator_addr)[0]

    @property
    def coordinator_port(self) -> int:
        """The port of `coordinator_addr`; a ConfigError if that is ""."""
        return parse_address(self.coordinator_addr)[1]


def setting_from_env(name: str) -> str | None:
    """Return the variable MURMURA_<NAME>, for callers that need one setting and no world; None if it is not set."""
    return os.environ.get(f"MURMURA_{name.upper()}") or None


DistributedTrainConfig = DistributedConfig
