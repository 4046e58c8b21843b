"""Where measurements are collected: a `Recorder` for a model on one rank, and a `Probe` for each of its channels.

Any thread may report. Nothing here communicates, and nothing waits but for the lock around the lists.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.autograd import profiler

from murmura.observe.spans import Span, Wait

PREFIX = "murmura::"  # of every span's name, here and in torch.profiler


class Recorder:
    """Spans and waits of one model on one rank; made in the training thread, whose waiting is what hurts."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.thread = threading.get_ident()
        self.thread_names = {self.thread: threading.current_thread().name}
        self.knows_peers = False  # whether the transport can tell whom it waits for
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._waits: list[Wait] = []
        self._running: set[_Running] = set()
        self._is_paused = False

    def span(
        self, name: str, *, exchange: bool = False, exposed: bool = False, operation: str = "", sent_bytes: int = 0
    ) -> AbstractContextManager[None]:
        """Record what runs inside, here and, if it is running, in torch.profiler under the same name."""
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

    def waited(self, peers: Sequence[int], began_ns: int, ended_ns: int) -> None:
        """Some thread has waited for each of `peers`."""
        with self._lock:
            if not self._is_paused:
                self._waits += [Wait(peer, began_ns, ended_ns) for peer in peers]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What ends inside is not recorded: it belongs to observing itself."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def take(self, ended_ns: int) -> tuple[list[Span], list[Span], list[Wait]]:
        """Hand over what lies before `ended_ns`: spans that have ended, spans under way so far, and waits.

        What reaches beyond that time is handed over again the next time.
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
    """A span under way; a context manager that is quicker than a generator, for there are many."""

    __slots__ = ("_in_torch", "_recorder", "_what", "began_ns", "thread")

    def __init__(self, recorder: Recorder, name: str, *what: Any) -> None:
        self._recorder = recorder
        self._what = name, what
        self._in_torch: Any = None

    def until(self, ended_ns: int) -> Span:
        name, what = self._what
        return Span(name, self.thread, self.began_ns, ended_ns, *what)

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self.began_ns = self._recorder.clock()
        self._recorder.begin(self)
        if profiler._is_profiler_enabled:  # a range costs more than all the rest here
            self._in_torch = profiler.record_function(self._what[0])
            self._in_torch.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._in_torch is not None:
            self._in_torch.__exit__(*error)
        self._recorder.end(self, self._recorder.clock())


class Probe:
    """What one channel reports to; `ranks[i]` is what rank i of the channel is called in the records."""

    def __init__(self, recorder: Recorder, ranks: Sequence[int]) -> None:
        self._recorder = recorder
        self._ranks = tuple(ranks)

    def within(self, members: Sequence[int]) -> Probe:
        """The probe of a channel of ranks `members` of this one."""
        return Probe(self._recorder, [self._ranks[member] for member in members])

    def operation(
        self, name: str, sent: Sequence[Tensor], work: Callable[[], Any], *, in_background: bool
    ) -> Callable[[], Any]:
        """`work`, for any thread, with its time and bytes recorded; the caller waits for it unless `in_background`."""
        recorder = self._recorder
        exposed = not in_background and threading.get_ident() == recorder.thread
        sent_bytes = sum(tensor.nbytes for tensor in sent)

        def observed() -> Any:
            with recorder.span(name, exchange=True, exposed=exposed, operation=name, sent_bytes=sent_bytes):
                return work()

        return observed

    def waiting(self, missing: Callable[[], list[int]]) -> Callable[[], list[int]]:
        """`missing`, which a wait asks again and again whom it waits for, with the answers recorded."""
        recorder, ranks = self._recorder, self._ranks
        recorder.knows_peers = True
        awaited: list[int] = []
        since = 0

        def observed() -> list[int]:
            nonlocal awaited, since
            now_missing = missing()
            if now_missing != awaited:
                now = recorder.clock()
                if awaited:
                    recorder.waited([ranks[peer] for peer in awaited], since, now)
                awaited, since = now_missing, now
            return now_missing

        return observed
