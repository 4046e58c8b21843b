"""Whom a rank waited for, told by the transports that know."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from murmura import ThrottledTransport, Ticket, TracedTransport, Transport
from murmura.observe.probe import Probe
from murmura.observe.span_log import SpanLog
from murmura.observe.spans import Wait
from worlds import World


class Telling(Probe):
    """Calls `tell`, once, when nobody but rank 2 of the channel is missing."""

    def __init__(self, span_log: SpanLog, ranks: range, tell: Callable[[], None]) -> None:
        super().__init__(span_log, ranks)
        self.tell: Callable[[], None] | None = tell

    def waiting(self, missing: Callable[[], list[int]]) -> Callable[[], list[int]]:
        ask = super().waiting(missing)

        def observed() -> list[int]:
            awaited = ask()
            if awaited == [2] and self.tell is not None:
                tell, self.tell = self.tell, None
                tell()
            return awaited

        return observed


def meet_a_straggler(transport: Transport) -> list[Wait]:
    """Rank 2 comes when rank 0 has told it, out of its wait, that only rank 2 is missing."""
    word = transport.channel("word")
    span_log = SpanLog(time.monotonic_ns)
    told: list[Ticket] = []
    if transport.rank == 2:
        word.recv(torch.zeros(1), 0)
    if transport.rank == 0:
        transport.observe(Telling(span_log, range(3), lambda: told.append(word.isend(torch.zeros(1), 2))))
        word.observe(None)
    transport.barrier()
    transport.observe(None)
    assert len(told) == (transport.rank == 0)
    for ticket in told:
        ticket.wait()
    return span_log.take(span_log.clock())[2]


def in_a_part(transport: Transport) -> list[int]:
    span_log = SpanLog(time.monotonic_ns)
    transport.observe(Probe(span_log, range(transport.world_size)))
    part = transport.subgroup([1, 2])
    if part is not None:
        part.barrier()
        part.barrier()
    transport.observe(None)
    if part is not None:
        part.barrier()
    return [wait.peer for wait in span_log.take(span_log.clock())[2]]


WORLDS = [
    World("in_process", "threads"),
    World("traced", "threads", wrap=TracedTransport),
    World("throttled", "threads", wrap=ThrottledTransport),
    World("shared_memory", "processes"),
]


@pytest.mark.parametrize("world", WORLDS[:2] + WORLDS[3:], ids=lambda world: world.name)
def test_the_straggler_is_named(world: World) -> None:
    waits, *others = world.run(meet_a_straggler, 3)
    assert others == [[], []]
    first = min(wait.began_ns for wait in waits)
    until = {wait.peer: wait.ended_ns - first for wait in waits}
    assert max(until, key=lambda peer: until[peer]) == 2
    assert set(until) <= {1, 2}


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_members_of_a_subgroup_have_their_names_of_the_whole(world: World) -> None:
    waits = world.run(in_a_part, 3)
    for rank, peers in enumerate(waits):
        assert set(peers) <= {0, 1, 2} - {rank}
    assert {peer for peers in waits[1:] for peer in peers} & {1, 2}
