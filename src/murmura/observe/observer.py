"""Observer measures every step of a training model, without changes to the training loop."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

from torch import Tensor, nn

from murmura.errors import ConfigError, UsageError
from murmura.observe.record import Record
from murmura.observe.sinks import Callback, JSONLines, Sink
from murmura.observe.span_log import SpanLog
from murmura.observe.spans import summarise
from murmura.observe.trace import TraceFile

Sinks = Sequence[Sink | Callable[[Record], object]]
NS_PER_MS = 1e6
NS_PER_S = 1e9


class Ranked(Protocol):
    """The part of a transport that an Observer needs."""

    @property
    def rank(self) -> int: ...


class Observable(Protocol):
    """The part of a DDP that an Observer needs."""

    @property
    def transport(self) -> Ranked: ...

    def observe(self, observer: Observer | None) -> None:
        """Report to `observer` from now on; None stops reporting."""
        ...

    def consensus_distance(self) -> float: ...


class Observer:
    """Inside ``with Observer(ddp, ...)``, each step of `ddp` is written as a `Record`.

    A step ends when the optimizer has stepped; its record is written when the next one begins, or the block ends, so
    that `log` may still add to it. An observer measures its own rank; to see all ranks, make one on every rank.

    Args:
        ddp: the wrapped model.
        sinks: where records go; a function is called with each. A path is short for ``[JSONLines(path)]``.
        trace: a folder for this rank's trace; `merge_traces` makes one file of all ranks'.
        consensus_every: measure `ddp.consensus_distance()` every so many steps; 0 is never. It is a collective, so give
            the same on every rank. Its time is in no record. The last step of the block is not measured.
        gradient_norm: whether to measure the norm of the gradients before the optimizer steps.
        clock: nanoseconds; for tests.
    """

    def __init__(
        self,
        ddp: Observable,
        sinks: str | os.PathLike[str] | Sinks = (),
        *,
        trace: str | os.PathLike[str] | None = None,
        consensus_every: int = 0,
        gradient_norm: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if consensus_every < 0:
            raise ConfigError(f"consensus_every={consensus_every}: give a number of steps, or 0 for never.")
        if isinstance(sinks, (str, os.PathLike)):
            sinks = [JSONLines(sinks)]
        self.latest: Record | None = None
        self._ddp = ddp
        self._rank = ddp.transport.rank
        self._sinks: list[Sink] = [each if isinstance(each, Sink) else Callback(each) for each in sinks]
        self._trace_folder = trace
        self._trace: TraceFile | None = None
        self._consensus_every = consensus_every
        self._wants_gradient_norm = gradient_norm
        self._clock = clock
        self._epoch_ns = 0  # added to the clock's time gives the time since the epoch
        self._step: int | None = None  # the current one; None before the first
        self._began_ns = 0
        self._stepped_ns: int | None = None  # when the optimizer last stepped in it
        self._paused_ns = 0  # since then, or before the first step
        self._gradient_norm: float | None = None
        self._logged: dict[str, float] = {}
        self._is_closed = False

    def __enter__(self) -> Self:
        if self._is_closed:
            raise UsageError("this Observer has ended: it observes once. Make a new one.")
        self.span_log = SpanLog(self._clock)
        self._ddp.observe(self)
        try:
            for sink in self._sinks:
                sink.open(self._rank)
            self._began_ns = self._clock()
            self._epoch_ns = time.time_ns() - self._began_ns
            if self._trace_folder is not None:
                self._trace = TraceFile(self._trace_folder, self._rank, self.span_log.thread, self._epoch_ns)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def log(self, **values: float | Tensor) -> None:
        """Add numbers to the record of the current step, which lasts until the next one begins: ``log(loss=loss)``.

        A tensor is read at once, which synchronises with its GPU.
        """
        for name, value in values.items():
            self._logged[name] = float(value.item() if isinstance(value, Tensor) else value)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block, between two steps, out of all records: evaluating, saving. `log` still works."""
        paused_at = self._clock()
        with self.span_log.paused():
            yield
        self._paused_ns += self._clock() - paused_at

    def close(self) -> None:
        """Write the last record and stop observing; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ddp.observe(None)
        with contextlib.ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)
            if self._trace is not None:
                closing.callback(self._trace.close)
            if self._step is not None:
                self._finish(self._step, self._end_of_step(), None)

    # What DDP calls, in the training thread

    def round_opens(self, number: int) -> None:
        """DDP calls this at the first forward of a round, which ends the step before."""
        if self._step is not None:
            ended, called = self._end_of_step(), self._clock()
            self._finish(self._step, ended, self._measure_consensus(self._step))
            self._began_ns = ended + self._clock() - called  # the time of observing itself is in no record
        self._began_ns += self._paused_ns
        self._paused_ns = 0
        self._step = number

    def before_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """DDP calls this when an optimizer is about to step, after clipping and unscaling."""
        if self._wants_gradient_norm and self._gradient_norm is None:
            gradients = [each.grad for each in parameters if each.grad is not None]
            self._gradient_norm = float(nn.utils.get_total_norm(gradients))

    def stepped(self) -> None:
        """DDP calls this when an optimizer has stepped and the algorithm's after_step has returned."""
        self._stepped_ns = self._clock()

    def _end_of_step(self) -> int:
        return self._clock() if self._stepped_ns is None else self._stepped_ns

    def _measure_consensus(self, step: int) -> float | None:
        if not self._consensus_every or (step + 1) % self._consensus_every != 0:
            return None
        with self.span_log.paused():
            return self._ddp.consensus_distance()

    def _finish(self, step: int, ended_ns: int, consensus_distance: float | None) -> None:
        """Write the record of the current step."""
        began_ns = self._began_ns
        spans, so_far, waits = self.span_log.take(ended_ns)
        summary = summarise([*spans, *so_far], waits, began_ns, ended_ns)
        waiting = {peer: ns / NS_PER_MS for peer, ns in summary.waiting_ns.items()}
        record = Record(
            step=step,
            rank=self._rank,
            time=(ended_ns + self._epoch_ns) / NS_PER_S,
            wall_ms=(ended_ns - began_ns) / NS_PER_MS,
            compute_ms=(ended_ns - began_ns - summary.exposed_ns) / NS_PER_MS,
            waited_ms=summary.exposed_ns / NS_PER_MS,
            exchange_ms=summary.exchange_ns / NS_PER_MS,
            hidden_ms=summary.hidden_ns / NS_PER_MS,
            bytes=summary.sent_bytes,
            waiting=waiting if self.span_log.knows_peers else None,
            gradient_norm=self._gradient_norm,
            consensus_distance=consensus_distance,
            logged=self._logged,
        )
        self.latest = record
        self._stepped_ns = self._gradient_norm = None
        self._logged = {}
        if self._trace is not None:
            self._trace.write_step(step, began_ns, ended_ns)
            self._trace.write(spans, self.span_log.thread_names)
        for sink in self._sinks:
            sink.write(record)


_NOTHING = contextlib.nullcontext()


def exposed(observer: Observer | None, name: str) -> AbstractContextManager[None]:
    """Log a span in which the training thread synchronises instead of training; a no-op without an observer."""
    return _NOTHING if observer is None else observer.span_log.span(name, exposed=True)


def exchanging(observer: Observer | None, what: str, index: int) -> AbstractContextManager[None]:
    """Log a span in which some thread exchanges `what`, the `index`-th of its kind; a no-op without an observer."""
    return _NOTHING if observer is None else observer.span_log.span(f"{what} {index}", exchange=True)
