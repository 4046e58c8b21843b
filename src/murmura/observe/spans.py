"""What a step's time was spent on, from the spans that were measured in it: pure arithmetic on intervals.

A span is a stretch of one thread's time, in nanoseconds. A step's window cuts those that reach beyond it, so an
exchange that runs through three steps counts in each of them with its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

Interval = tuple[int, int]


class Span(NamedTuple):
    """One stretch of a thread's time, by the observer's clock."""

    name: str
    thread: int
    began_ns: int
    ended_ns: int
    is_exchange: bool  # tensors were on their way
    is_exposed: bool  # the training thread could not go on meanwhile
    operation: str = ""  # of a transport; then with the bytes given to it
    sent_bytes: int = 0


class Wait(NamedTuple):
    """A stretch of time in which `peer` was waited for, in any thread."""

    peer: int
    began_ns: int
    ended_ns: int


class Summary(NamedTuple):
    """Where the time of a window went, in nanoseconds."""

    exchange_ns: int
    hidden_ns: int
    exposed_ns: int
    sent_bytes: dict[str, int]  # by operation, of those that ended before the window did
    waiting_ns: dict[int, int]  # by peer


def summarise(spans: Sequence[Span], waits: Sequence[Wait], began_ns: int, ended_ns: int) -> Summary:
    """What happened between `began_ns` and `ended_ns`."""
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
    """The same stretches of time, in order and without overlap."""
    merged: list[Interval] = []
    for began, ended in sorted(intervals):
        if merged and began <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], ended)
        elif ended > began:
            merged.append((began, ended))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The time that is in both; each is in order and without overlap."""
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
