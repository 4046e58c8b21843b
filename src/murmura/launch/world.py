"""`run_world` runs one function on n ranks and returns their results; the failure of one rank stops all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from murmura.config import find_faults, is_integer, raise_faults
from murmura.errors import ConfigError
from murmura.launch.processes import run_processes
from murmura.launch.threads import run_threads
from murmura.types import TransportKind, parse

__all__ = ["run_world"]


class WorldKind(StrEnum):
    """What runs a rank."""

    THREADS = "threads"
    PROCESSES = "processes"


_LEGAL = {
    WorldKind.THREADS: (TransportKind.IN_PROCESS,),
    WorldKind.PROCESSES: (
        TransportKind.SHARED_MEMORY,
        TransportKind.GLOO,
        TransportKind.NCCL,
        TransportKind.HIERARCHICAL,
    ),
}


def run_world(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    kind: str = "threads",
    transport: str | None = None,
    hosts: Sequence[int] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call ``fn(transport, *args)`` on every rank of a new world and return the results in rank order.

    With threads `fn` may be any callable, also one defined in a notebook's cell; the ranks share torch's global
    random state. With processes `fn`, `args` and results are pickled, so `fn` must be defined at the top level of a
    module or of the running script (which then needs ``if __name__ == "__main__":``).

    If a rank raises, the others are cancelled at their next communication, and its exception is raised here, its rank
    in the message. A rank that has not ended `timeout` seconds after the last of the others is killed and named.

    Args:
        transport: with processes, "shared_memory" (the default), "gloo", "nccl" or "hierarchical".
        hosts: simulated hosts, the index of a host for each rank: ``[0, 0, 1, 1]``.
        timeout: the deadline of each wait, 600 seconds if not given.
    """
    world = parse(WorldKind, kind, "kind")
    legal = _LEGAL[world]
    chosen = legal[0] if transport is None else parse(TransportKind, transport, "transport")
    if chosen not in legal:
        choices = " or ".join(repr(str(each)) for each in legal)
        raise ConfigError(f"transport='{chosen}' does not join {kind}. With kind='{kind}' take {choices}.")
    if not callable(fn):
        raise ConfigError(f"fn={fn!r} cannot be called: give the function that every rank runs.")
    if not is_integer(world_size) or world_size < 1:
        raise ConfigError(f"world_size={world_size!r}: a world has at least one rank. Give a whole number.")
    if hosts is not None and not _is_host_list(hosts, world_size):
        raise ConfigError(f"hosts={hosts!r}: name a host from 0 on for each of the {world_size} ranks: [0, 0, 1, 1].")
    seconds = 600.0 if timeout is None else timeout
    raise_faults(find_faults({"timeout": seconds}), "run_world")
    if world is WorldKind.THREADS:
        return run_threads(fn, world_size, args, hosts, seconds)
    return run_processes(fn, world_size, args, hosts, seconds, chosen)


def _is_host_list(hosts: object, world_size: int) -> bool:
    return (
        isinstance(hosts, Sequence)
        and len(hosts) == world_size
        and all(is_integer(host) and host >= 0 for host in hosts)
    )
