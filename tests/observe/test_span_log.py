"""What a span log keeps of spans and waits, on a clock that is moved by hand."""

from __future__ import annotations

import threading

import pytest
import torch

from murmura.observe.probe import Probe
from murmura.observe.span_log import SpanLog
from murmura.observe.spans import summarise
from observe.clocks import MS, HandClock


def test_an_exchange_through_several_steps_counts_in_each_with_its_part() -> None:
    clock = HandClock()
    span_log, start = SpanLog(clock), clock.now
    with span_log.span("average", exchange=True, operation="all_reduce", sent_bytes=64):
        clock.pass_ms(3)
        first = span_log.take(clock.now)
        clock.pass_ms(5)
        second = span_log.take(clock.now)
        clock.pass_ms(2)
    third = span_log.take(clock.now)

    windows = [(start, start + 3 * MS), (start + 3 * MS, start + 8 * MS), (start + 8 * MS, start + 10 * MS)]
    summaries = [
        summarise([*ended, *so_far], waits, *window)
        for (ended, so_far, waits), window in zip([first, second, third], windows, strict=True)
    ]
    assert [each.exchange_ns for each in summaries] == [3 * MS, 5 * MS, 2 * MS]
    assert [each.sent_bytes for each in summaries] == [{}, {}, {"all_reduce": 64}]
    assert [len(each[0]) for each in (first, second, third)] == [0, 0, 1]  # a trace gets it once, whole


def test_what_ends_after_a_boundary_is_kept_for_the_next_step() -> None:
    clock = HandClock()
    span_log = SpanLog(clock)
    clock.pass_ms(1)
    boundary = clock.now
    with span_log.span("late", exchange=True, operation="exchange", sent_bytes=8):
        clock.pass_ms(1)
    span_log.add_waits([1], boundary - MS, clock.now)
    ended, so_far, waits = span_log.take(boundary)
    assert (ended, so_far) == ([], [])
    assert summarise([], waits, boundary - MS, boundary).waiting_ns == {1: MS}
    ended, _, waits = span_log.take(clock.now)
    assert [span.name for span in ended] == ["murmura::late"]
    assert summarise(ended, waits, boundary, clock.now).waiting_ns == {1: MS}


def test_a_wait_is_charged_to_each_peer_until_that_one_has_come() -> None:
    clock = HandClock()
    span_log = SpanLog(clock)
    answers = iter([[0, 2], [0, 2], [2], []])
    ask = Probe(span_log, [10, 11, 12]).waiting(lambda: next(answers))
    for milliseconds in (1, 2, 4, 8):
        clock.pass_ms(milliseconds)
        ask()
    waits = span_log.take(clock.now)[2]
    assert {wait.peer: wait.ended_ns - wait.began_ns for wait in waits if wait.peer == 10} == {10: 6 * MS}
    assert sum(wait.ended_ns - wait.began_ns for wait in waits if wait.peer == 12) == 14 * MS


def test_peers_of_a_part_of_the_world_have_their_names_of_the_whole() -> None:
    span_log = SpanLog(HandClock())
    answers = iter([[1], []])
    ask = Probe(span_log, range(8)).within([4, 5, 6]).within([2, 0]).waiting(lambda: next(answers))
    ask()
    ask()
    assert [wait.peer for wait in span_log.take(span_log.clock())[2]] == [4]


@pytest.mark.parametrize(("in_background", "in_thread"), [(False, False), (True, False), (False, True)])
def test_only_what_the_training_thread_waits_for_is_exposed(in_background: bool, in_thread: bool) -> None:
    span_log = SpanLog(HandClock())
    probe = Probe(span_log, [0])

    def call() -> None:
        work = probe.operation("all_reduce", [torch.zeros(3)], lambda: None, in_background=in_background)
        other = threading.Thread(target=work)  # wherever it runs
        other.start()
        other.join()

    if in_thread:
        caller = threading.Thread(target=call)
        caller.start()
        caller.join()
    else:
        call()
    (span,) = span_log.take(span_log.clock())[0]
    assert span.is_exposed is not (in_background or in_thread)
    assert (span.is_exchange, span.operation, span.sent_bytes) == (True, "all_reduce", 12)


def test_what_ends_in_a_pause_leaves_no_trace() -> None:
    span_log = SpanLog(HandClock())
    with span_log.paused(), span_log.span("own business", exchange=True):
        span_log.add_waits([1], 0, 1)
    assert span_log.take(span_log.clock()) == ([], [], [])


def test_a_span_that_ends_in_an_error_is_kept() -> None:
    span_log = SpanLog(HandClock())
    with pytest.raises(ZeroDivisionError), span_log.span("broken"):
        1 / 0  # noqa: B018
    assert [span.name for span in span_log.take(span_log.clock())[0]] == ["murmura::broken"]
