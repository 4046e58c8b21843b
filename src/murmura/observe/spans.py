"""Arithmetic on intervals: sum up the spans that were measured during a step.

A span is an interval of one thread's time, in nanoseconds. Spans are cut at the ends of a step, so an exchange that
lasts three steps counts in each with the part that lies in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Interval = tuple[int, int]


class Span(NamedTuple):
    """An interval of a thread's time, by the observer's clock."""

    name: str
    thread: int
    began_ns: int
    ended_ns: int
    is_exchange: bool  # tensors were being exchanged
    is_exposed: bool  # the training thread waited for it
    operation: str = ""  # the transport's operation, if it is one; then `sent_bytes` were passed to it
    sent_bytes: int = 0


class Wait(NamedTuple):
    """An interval in which some thread waited for `peer`."""

    peer: int
    began_ns: int
    ended_ns: int


class Summary(NamedTuple):
    """The sums over one window of time, in nanoseconds and bytes."""

    exchange_ns: int
    hidden_ns: int
    exposed_ns: int
    sent_bytes: dict[str, int]  # by operation, of operations that ended in the window
    waiting_ns: dict[int, int]  # by peer


def summarise(spans: Sequence[Span], waits: Sequence[Wait], began_ns: int, ended_ns: int) -> Summary:
    """Sum up what happened between `began_ns` and `ended_ns`."""
    exchange = union((span.began_ns, span.ended_ns) for span in spans if span.is_exchange)
    exposed = union((span.began_ns, span.ended_ns) for span in spans if span.is_exposed)
    window = [(began_ns, ended_ns)]
    exchange, exposed = intersection(exchange, window), intersection(exposed, window)
    sent_bytes: dict[str, int] = {}
    for span in spans:
        if span.sent_bytes and span.ended_ns <= ended_ns:
            sent_bytes[span.operation] = sent_bytes.get(span.operation, 0) + span.sent_bytes
    waiting = {}
    for peer in sorted({wait.peer for wait in waits}):
        of_peer = union((wait.began_ns, wait.ended_ns) for wait in waits if wait.peer == peer)
        if waited := length(intersection(of_peer, window)):
            waiting[peer] = waited
    return Summary(
        exchange_ns=length(exchange),
        hidden_ns=length(exchange) - length(intersection(exchange, exposed)),
        exposed_ns=length(exposed),
        sent_bytes=sent_bytes,
        waiting_ns=waiting,
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals, sorted and without overlap."""
    merged: list[Interval] = []
    for began, ended in sorted(intervals):
        if merged and began <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], ended)
        elif ended > began:
            merged.append((began, ended))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return the time that is in both; each must be sorted and without overlap."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        began, ended = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if began < ended:
            common.append((began, ended))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def length(intervals: Iterable[Interval]) -> int:
    return sum(ended - began for began, ended in intervals)
