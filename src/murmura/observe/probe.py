"""A Probe reports what one channel of a transport does to the `SpanLog` of the model that uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from murmura.observe.span_log import SpanLog


class Probe:
    """Reports the operations and waits of one channel; `ranks[i]` is the number of its rank i in the records."""

    def __init__(self, span_log: SpanLog, ranks: Sequence[int]) -> None:
        self._span_log = span_log
        self._ranks = tuple(ranks)

    def within(self, members: Sequence[int]) -> Probe:
        """Return the probe for a channel between ranks `members` of this one."""
        return Probe(self._span_log, [self._ranks[member] for member in members])

    def operation(
        self, name: str, sent: Sequence[Tensor], work: Callable[[], Any], *, in_background: bool
    ) -> Callable[[], Any]:
        """Wrap `work` to log its time and bytes, in any thread; the caller waits unless `in_background`."""
        span_log = self._span_log
        exposed = not in_background and threading.get_ident() == span_log.thread
        sent_bytes = sum(tensor.nbytes for tensor in sent)

        def observed() -> Any:
            with span_log.span(name, exchange=True, exposed=exposed, operation=name, sent_bytes=sent_bytes):
                return work()

        return observed

    def waiting(self, missing: Callable[[], list[int]]) -> Callable[[], list[int]]:
        """Wrap `missing`, which a wait calls repeatedly for the peers it still waits for, to log how long each was."""
        span_log, ranks = self._span_log, self._ranks
        span_log.knows_peers = True
        awaited: list[int] = []
        since = 0

        def observed() -> list[int]:
            nonlocal awaited, since
            now_missing = missing()
            if now_missing != awaited:
                now = span_log.clock()
                if awaited:
                    span_log.add_waits([ranks[peer] for peer in awaited], since, now)
                awaited, since = now_missing, now
            return now_missing

        return observed
