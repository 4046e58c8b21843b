"""Reads what torchrun, Open MPI, MPICH, SLURM and murmura's own variables tell a rank of its place in the world.

No other module of the library takes a setting from os.environ (`transports.own_groups` writes there what NCCL is to
read). LAUNCHERS lists the launchers whose variables it understands, in order of precedence. If several variables may
hold a value, the first that is set is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from murmura.errors import ConfigError

T = TypeVar("T")
Sources = Mapping[str, Callable[[str], T]]  # parsers, by variable
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 29500
_RANGE = r"[0-9]+(?:-[0-9]+)?"
_FIRST_ENTRY = re.compile(rf"((?:[\w.-]|\[{_RANGE}(?:,{_RANGE})*\])+)(?:,.+)?")


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
        host, port = host or DEFAULT_HOST, DEFAULT_PORT if port is None else port
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
        parts[0] = address or f"{DEFAULT_HOST}:{DEFAULT_PORT}"
    return ".".join(parts)


def read_environment(env: Mapping[str, str] | None = None) -> tuple[dict[str, Any], list[str], str]:
    """Return the fields of a DistributedConfig that `env` (os.environ) sets, its faults, and where they are from."""
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
    return values, variables.faults, f"the environment ({launcher.name})" if launcher else "the environment"


def set_torchrun_variables() -> bool:
    """Set torchrun's variables from those of SLURM or MPI, for code that reads only torchrun's.

    Returns False if another launcher, or none, started this process. Raises `ConfigError` if variables are missing.
    """
    variables = Variables(os.environ)
    launcher = find_launcher(variables.env)
    if launcher is None or launcher is TORCHRUN:
        return False
    place = read_launcher(variables, launcher)
    if variables.faults:
        raise ConfigError(" ".join(variables.faults))
    host, _, port = (place["coordinator_addr"] or "").rpartition(":")
    values = {
        "RANK": place["rank"],
        "WORLD_SIZE": place["world_size"],
        "LOCAL_RANK": place.get("local_rank"),
        "LOCAL_WORLD_SIZE": place.get("local_world_size"),
        "MASTER_ADDR": host.strip("[]") or None,
        "MASTER_PORT": port or None,
    }
    os.environ.update({name: str(value) for name, value in values.items() if value is not None})
    return True


def local_rank_from_env() -> int | None:
    """Return the number of this rank on its host, as the launcher tells it; None if none does."""
    variables = Variables(os.environ)
    launcher = find_launcher(variables.env)
    if launcher is None:
        return None
    return variables.read(launcher.required.get("local_rank") or launcher.optional.get("local_rank") or {})


def setting_from_env(name: str) -> str | None:
    """Return the variable MURMURA_<NAME>, for callers that need one setting and no world; None if it is not set."""
    return os.environ.get(f"MURMURA_{name.upper()}") or None
