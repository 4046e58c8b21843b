"""The arithmetic of spans, compared with counting one nanosecond after another."""

from __future__ import annotations

import random

import pytest

from murmura.observe.spans import Span, Wait, intersection, length, summarise, union


def ticks(intervals: list[tuple[int, int]]) -> set[int]:
    return {tick for began, ended in intervals for tick in range(began, ended)}


def some_intervals(draw: random.Random) -> list[tuple[int, int]]:
    begins = [draw.randrange(40) for _ in range(draw.randrange(6))]
    return [(began, began + draw.randrange(12)) for began in begins]


@pytest.mark.parametrize("seed", range(50))
def test_unions_and_intersections_hold_the_right_moments(seed: int) -> None:
    draw = random.Random(seed)
    first, second = some_intervals(draw), some_intervals(draw)
    assert ticks(union(first)) == ticks(first)
    assert length(union(first)) == len(ticks(first))
    assert union(union(first)) == union(first)
    common = intersection(union(first), union(second))
    assert ticks(common) == ticks(first) & ticks(second)
    assert length(common) == len(ticks(common))


@pytest.mark.parametrize("seed", range(50))
def test_a_window_is_split_into_what_was_exchanged_hidden_and_waited_for(seed: int) -> None:
    draw = random.Random(seed)
    spans = [
        Span("", draw.randrange(3), began, ended, draw.random() < 0.6, draw.random() < 0.4)
        for began, ended in some_intervals(draw) + some_intervals(draw)
    ]
    waits = [Wait(draw.randrange(3), began, ended) for began, ended in some_intervals(draw)]
    window = set(range(10, 30))
    exchanged = ticks([(each.began_ns, each.ended_ns) for each in spans if each.is_exchange]) & window
    exposed = ticks([(each.began_ns, each.ended_ns) for each in spans if each.is_exposed]) & window
    of_peer = {peer: ticks([each[1:] for each in waits if each.peer == peer]) & window for peer in range(3)}

    summary = summarise(spans, waits, 10, 30)

    assert summary.exchange_ns == len(exchanged)
    assert summary.hidden_ns == len(exchanged - exposed)
    assert summary.exposed_ns == len(exposed)
    assert summary.waiting_ns == {peer: len(found) for peer, found in of_peer.items() if found}


def test_bytes_count_where_their_operation_ended() -> None:
    def sent(operation: str, ended: int, num_bytes: int) -> Span:
        return Span(operation, 0, 0, ended, True, False, operation, num_bytes)

    spans = [sent("exchange", 5, 8), sent("all_reduce", 10, 100), sent("all_reduce", 3, 20), sent("exchange", 11, 16)]
    assert summarise(spans, [], 0, 10).sent_bytes == {"exchange": 8, "all_reduce": 120}
