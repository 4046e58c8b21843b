"""SpanLog collects the measurements of one model on one rank: spans of time in its threads, and waits for peers.

Any thread may add to it. It never communicates, and holds its lock only to change a list.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler

from murmura.observe.spans import Span, Wait

PREFIX = "murmura::"  # of every span's name, here and in torch.profiler


class SpanLog:
    """Spans and waits of one model on one rank; made in the training thread, whose waiting is exposed time."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.thread = threading.get_ident()
        self.thread_names = {self.thread: threading.current_thread().name}
        self.knows_peers = False  # whether the transport reports which peers it waits for
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._waits: list[Wait] = []
        self._running: set[_Running] = set()
        self._is_paused = False

    def span(
        self, name: str, *, exchange: bool = False, exposed: bool = False, operation: str = "", sent_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Log the time of the block, also under the same name in torch.profiler if that is active."""
        return _Running(self, PREFIX + name, exchange, exposed, operation, sent_bytes)

    def begin(self, running: _Running) -> None:
        thread = running.thread
        if thread not in self.thread_names:
            self.thread_names[thread] = threading.current_thread().name
        with self._lock:
            self._running.add(running)

    def end(self, running: _Running, ended_ns: int) -> None:
        with self._lock:
            self._running.remove(running)
            if not self._is_paused:
                self._spans.append(running.until(ended_ns))

    def add_waits(self, peers: Sequence[int], began_ns: int, ended_ns: int) -> None:
        """Log that some thread waited for each of `peers`."""
        with self._lock:
            if not self._is_paused:
                self._waits += [Wait(peer, began_ns, ended_ns) for peer in peers]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not log what ends inside the block: it belongs to observing itself."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def take(self, ended_ns: int) -> tuple[list[Span], list[Span], list[Wait]]:
        """Remove and return what lies before `ended_ns`: ended spans, the part so far of running spans, and waits.

        What reaches beyond that time is returned again by the next call.
        """
        with self._lock:
            spans, waits = self._spans, self._waits
            self._spans = [span for span in spans if span.ended_ns > ended_ns]
            self._waits = [wait for wait in waits if wait.ended_ns > ended_ns]
            running = [each.until(ended_ns) for each in self._running]
        ended = [span for span in spans if span.ended_ns <= ended_ns]
        running += [span._replace(ended_ns=ended_ns) for span in spans if span.ended_ns > ended_ns]
        so_far = [span._replace(sent_bytes=0) for span in running if span.began_ns < ended_ns]
        return ended, so_far, waits


class _Running:
    """A running span; a class because contextlib's generators are slower, and there are many spans."""

    __slots__ = ("_in_torch", "_span_log", "_what", "began_ns", "thread")

    def __init__(self, span_log: SpanLog, name: str, *what: Any) -> None:
        self._span_log = span_log
        self._what = name, what
        self._in_torch: Any = None

    def until(self, ended_ns: int) -> Span:
        name, what = self._what
        return Span(name, self.thread, self.began_ns, ended_ns, *what)

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.began_ns = self._span_log.clock()
        self._span_log.begin(self)
        if profiler._is_profiler_enabled:  # a profiler range costs more than the rest of a span
            self._in_torch = profiler.record_function(self._what[0])
            self._in_torch.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._in_torch is not None:
            self._in_torch.__exit__(*error)
        self._span_log.end(self, self._span_log.clock())
