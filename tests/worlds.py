"""The worlds that the contract suites run on, one line each: add a transport here and every suite covers it.

A function that runs on ranks stands at the top level of its module, because processes import it by name.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import distributed

from murmura import (
    FaultyTransport,
    HierarchicalTransport,
    ProcessGroupTransport,
    ThrottledTransport,
    TracedTransport,
    Transport,
    run_world,
)
from murmura.transports.process_group import Check
from murmura.transports.shared_memory import peer_memory, session

SECONDS = 40.0  # of any wait, below the time pytest gives a test, so that a hang is told by the rank that hangs


class ExchangeOnly(Transport):
    """A backend that writes only what it must, over another transport: every collective is the inherited one."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(
            inner.rank,
            inner.world_size,
            hosts=inner.hosts,
            timeout=inner.timeout,
            name="exchange-only",
            world_ranks=inner.world_ranks,
        )
        self._inner = inner

    def do_exchange(self, sends: Any, recvs: Any, timeout: float | None) -> None:
        self._inner.exchange(sends, recvs, timeout=timeout)

    def split(self, name: str, ranks: Sequence[int] | None = None) -> ExchangeOnly | None:
        inner = self._inner.split(name, ranks)
        if inner is None:
            return None
        split = ExchangeOnly(inner)
        self.keep_split(split, ranks)
        return split

    def on_abort(self, error: BaseException) -> None:
        self._inner.abort(error)

    def on_close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class World:
    """How to start the ranks, and what may be asked of their transport.

    Attributes:
        wrap: makes the transport under test of the one that `run_world` hands to a rank.
        exact: whether sums are made in the library's own order, and so known to the bit.
        hops: whether its sums go round a ring, so that fp16 and bf16 are rounded after each hop.
        checks: whether ranks that call different collectives are all told so.
        checks_messages: whether a message that does not fit is told to both ranks.
        place: says on which host each rank of so many is; all are on one if it is not given.
        arena: whether memory from `allocate` is another kind than ordinary memory.
        slow: whether it is left to the long run.
    """

    name: str
    kind: str
    transport: str | None = None
    wrap: Callable[[Transport], Transport] | None = None
    exact: bool = True
    hops: bool = False
    checks: bool = True
    checks_messages: bool = True
    place: Callable[[int], list[int]] | None = None
    arena: bool = False
    slow: bool = False

    def hosts(self, world_size: int) -> list[int]:
        return self.place(world_size) if self.place else [0] * world_size

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = SECONDS) -> list[Any]:
        """`run_world`, on the transport under test; a warning is an error on every rank."""
        options = {"kind": self.kind, "transport": self.transport, "timeout": timeout, "hosts": self.hosts(world_size)}
        return run_world(_run_rank, world_size, self.wrap, fn, *args, **options)


def _run_rank(
    inner: Transport, wrap: Callable[[Transport], Transport] | None, fn: Callable[..., Any], *args: Any
) -> Any:
    if multiprocessing.parent_process() is not None:  # pytest has seen to it in its own process
        warnings.simplefilter("error")
    if wrap is None:
        return fn(inner, *args)
    with wrap(inner) as transport:
        return fn(transport, *args)


@contextlib.contextmanager
def torch_group(transport: Transport, store: str) -> Iterator[None]:
    """Torch's default group on Gloo, of the ranks of `transport`; they meet in the file `store`."""
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, transport.world_size),
        rank=transport.rank,
        world_size=transport.world_size,
        timeout=datetime.timedelta(seconds=SECONDS),
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def never_faulty(transport: Transport) -> Transport:
    return FaultyTransport(transport, "raise", rank=0, operation="barrier #1000000")


def hardly_throttled(transport: Transport) -> Transport:
    return ThrottledTransport(transport, bandwidth="1000gbit")


def checked(transport: Transport) -> Transport:
    """The same transport, whose ranks compare calls before every operation."""
    assert isinstance(transport, ProcessGroupTransport | HierarchicalTransport)
    transport.check = Check.ALWAYS
    return transport


def with_threads(transport: Transport) -> Transport:
    """The same transport on a rank that has three threads, however many cores there are."""
    torch.set_num_threads(3)
    session.num_threads = lambda num_ranks: 3
    return transport


def reading_peers(transport: Transport) -> Transport:
    """The same transport, which reads its peers' memory from the first large tensor on, whatever pages it has."""
    peer_memory.MIN_BYTES, peer_memory.SIGHTINGS = 0, 1
    peer_memory._collapse = lambda address, num_bytes: True
    transport.barrier()  # from now on all ranks can be read
    return transport


def halves(world_size: int) -> list[int]:
    """Two hosts, the first with one rank more if need be."""
    return [2 * rank // (world_size + world_size % 2) for rank in range(world_size)]


def interleaved(world_size: int) -> list[int]:
    return [rank % 2 for rank in range(world_size)]


WORLDS = (
    World("in_process", "threads"),
    World("shared_memory", "processes", arena=True),
    World("exchange_only", "threads", wrap=ExchangeOnly, hops=True, checks=False),
    World("traced", "threads", wrap=TracedTransport, slow=True),
    World("traced_shared_memory", "processes", wrap=TracedTransport, arena=True, slow=True),
    World("faulty", "threads", wrap=never_faulty, slow=True),
    World("throttled", "threads", wrap=hardly_throttled, hops=True, slow=True),
    World("gloo", "processes", "gloo", exact=False, checks=False, checks_messages=False, slow=True),
    World("gloo_checked", "processes", "gloo", wrap=checked, exact=False, slow=True),
    World(
        "traced_gloo",
        "processes",
        "gloo",
        wrap=TracedTransport,
        exact=False,
        checks=False,
        checks_messages=False,
        slow=True,
    ),
    World(
        "hierarchical",
        "processes",
        "hierarchical",
        exact=False,
        checks=False,
        checks_messages=False,
        place=halves,
        arena=True,
        slow=True,
    ),
    World(
        "hierarchical_checked",
        "processes",
        "hierarchical",
        wrap=checked,
        exact=False,
        place=interleaved,
        arena=True,
        slow=True,
    ),
)


OTHER_WAYS = (
    World("shared_memory_threads", "processes", wrap=with_threads, arena=True),
    World("peer_memory", "processes", wrap=reading_peers, arena=True),
)
"""Ways that shared memory takes for large tensors only, if there are cores to spare, or a tensor comes often."""


def those(claim: Callable[[World], bool] = lambda world: True) -> list[Any]:
    """The worlds of which `claim` holds, as parameters of a test."""
    return [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * each.slow) for each in WORLDS if claim(each)]


def pairs(**axes: Sequence[Any]) -> Any:
    """Every combination of the axes' values; a choice in which any two fast values of two axes meet is not slow."""
    params = [[each if hasattr(each, "marks") else pytest.param(each, id=f"{each}") for each in axes[x]] for x in axes]
    cases = list(itertools.product(*(range(len(axis)) for axis in params)))
    fast = [case for case in cases if not any(axis[place].marks for axis, place in zip(params, case, strict=True))]
    unmet = {case: set(itertools.combinations(enumerate(case), 2)) for case in fast}
    chosen = set()
    while any(unmet.values()):
        best = max(fast, key=lambda case: len(unmet[case]))
        chosen.add(best)
        met = unmet[best]
        unmet = {case: left - met for case, left in unmet.items()}
    values = [[axis[place] for axis, place in zip(params, case, strict=True)] for case in cases]
    marked = [
        pytest.param(
            *(each.values[0] for each in value),
            id="-".join(each.id for each in value),
            marks=[pytest.mark.slow] * (case not in chosen),
        )
        for case, value in zip(cases, values, strict=True)
    ]
    return pytest.mark.parametrize(tuple(axes), marked)
