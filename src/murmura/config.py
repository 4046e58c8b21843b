"""DistributedConfig holds one rank's place in its world and how it connects to the others, validated as a whole.

One ConfigError lists all faults.
"""

from __future__ import annotations

import ipaddress
import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from murmura.environment import DEFAULT_HOST, DEFAULT_PORT, read_environment
from murmura.errors import ConfigError
from murmura.types import DistributedBackend, DistributedRole, TransportKind, parse

__all__ = ["DistributedConfig", "DistributedTrainConfig", "parse_address"]

DEFAULT_COORDINATOR = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
ENUMS = {"role": DistributedRole, "backend": DistributedBackend, "transport": TransportKind}
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


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


def role_of(rank: int) -> DistributedRole:
    return DistributedRole.COORDINATOR if rank == 0 else DistributedRole.WORKER


def find_faults(given: Mapping[str, Any]) -> list[str]:
    """Return the faults of the fields in `given`; a rule that needs an absent or faulty field is skipped."""
    return [*_place_faults(given), *_choice_faults(given), *_connection_faults(given)]


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _place_faults(given: Mapping[str, Any]) -> Iterator[str]:
    places = {name: given[name] for name in ("world_size", "rank", "local_rank") if name in given}
    if given.get("local_world_size") is not None:
        places["local_world_size"] = given["local_world_size"]
    for name, value in places.items():
        if not is_integer(value):
            yield f"{name}={value!r} is not an integer. Pass a whole number."
        elif name.endswith("size") and value < 1:
            yield f"{name}={value} is below 1. Count this rank in."
        elif value < 0:
            yield f"{name}={value} is negative. Count from 0."
    # A size below 1 is reported above; it counts as 1 here, so that it does not cause a second fault.
    limits = {name: max(value, 1) for name, value in places.items() if is_integer(value)}
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
    if role in list(DistributedRole) and is_integer(rank) and role != role_of(given["rank"]):
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
    if not (is_integer(timeout) or isinstance(timeout, float)) or not 0 < timeout <= sys.float_info.max:
        yield f"timeout={timeout!r} is not a finite number above 0. Pass seconds."


def raise_faults(faults: list[str], where: str) -> None:
    if faults:
        head = f"{where} has {len(faults)} fault{'s' if len(faults) > 1 else ''}:"
        raise ConfigError("\n  - ".join([head, *faults]))


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
        values, faults, where = read_environment(env)
        raise_faults([*faults, *find_faults(values)], where)
        return cls(**values)

    @property
    def coordinator_host(self) -> str:
        """The host of `coordinator_addr`, without the brackets of IPv6; a ConfigError if that is ""."""
        return parse_address(self.coordinator_addr)[0]

    @property
    def coordinator_port(self) -> int:
        """The port of `coordinator_addr`; a ConfigError if that is ""."""
        return parse_address(self.coordinator_addr)[1]


DistributedTrainConfig = DistributedConfig
