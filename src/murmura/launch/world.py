"""run_world: one function, n ranks, their results in rank order; one rank's failure ends them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from murmura.errors import ConfigError
from murmura.launch.processes import run_processes
from murmura.launch.threads import run_threads
from murmura.transports.checks import check_timeout
from murmura.types import TransportKind, parse

__all__ = ["run_world"]


class WorldKind(StrEnum):
    """What a rank is."""

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
    random state. With processes `fn`, `args` and results are pickled, so `fn` must stand at the top level of a module
    or of the running script (which then needs its ``if __name__ == "__main__":``).

    If a rank raises, the others are cancelled at their next communication, and its exception is raised here, its rank
    in the message. A rank that has not ended `timeout` seconds after the last of the others is killed and named.

    Args:
        transport: with processes, "shared_memory" (the default), "gloo", "nccl" or "hierarchical".
        hosts: on which host each rank pretends to be, by rank: ``[0, 0, 1, 1]``.
        timeout: the deadline of each wait, 600 seconds if not given.
    """
    world = parse(WorldKind, kind, "kind")
    legal = _LEGAL[world]
    chosen = legal[0] if transport is None else parse(TransportKind, transport, "transport")
    if chosen not in legal:
        choices = " or ".join(repr(str(each)) for each in legal)
        raise ConfigError(f"transport='{chosen}' does not join {kind}. With kind='{kind}' take {choices}.")
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: a world has at least one rank.")
    check_timeout(timeout, ConfigError)
    seconds = 600.0 if timeout is None else timeout
    if world is WorldKind.THREADS:
        return run_threads(fn, world_size, args, hosts, seconds)
    return run_processes(fn, world_size, args, hosts, seconds, chosen)
