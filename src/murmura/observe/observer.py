"""Observer: a record for every step of a model that trains, while the training loop stays as it is."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from torch import Tensor, nn

from murmura.errors import ConfigError, UsageError
from murmura.observe.record import Record
from murmura.observe.recorder import Recorder
from murmura.observe.sinks import Callback, JSONLines, Sink
from murmura.observe.spans import summarise
from murmura.observe.trace import TraceFile

Sinks = Sequence[Sink | Callable[[Record], object]]
NS_PER_MS = 1e6
NS_PER_S = 1e9


class Ranked(Protocol):
    """A transport, of which nothing but the rank is needed here."""

    @property
    def rank(self) -> int: ...


class Observable(Protocol):
    """What can be observed: a DDP."""

    @property
    def transport(self) -> Ranked: ...

    def observe(self, observer: Observer | None) -> None:
        """Report to `observer` from now on; None ends it."""
        ...

    def consensus_distance(self) -> float: ...


class Observer:
    """Inside ``with Observer(ddp, ...)``, each step of `ddp` leaves a `Record`.

    A step ends when the optimizer has stepped; its record is written when the next one begins, or the block ends, so
    that `log` may still add to it. Everything is measured on this rank; to see all, observe on every rank.

    Args:
        ddp: the wrapped model.
        sinks: where records go; a function is called with each. A path is short for ``[JSONLines(path)]``.
        trace: a folder for this rank's trace; `merge_traces` makes one file of all ranks'.
        consensus_every: measure `ddp.consensus_distance()` every so many steps, on every rank alike, for that is a
            collective; 0 is never. Its own time is in no record. The last step of a block is left out.
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
        self._epoch_ns = 0  # added to the clock's time gives that since the epoch
        self._step: int | None = None  # under way; None before the first
        self._began_ns = 0
        self._stepped_ns: int | None = None  # when the optimizer last stepped in it
        self._paused_ns = 0  # since then, or before the first step
        self._gradient_norm: float | None = None
        self._logged: dict[str, float] = {}
        self._is_closed = False

    def __enter__(self) -> Self:
        if self._is_closed:
            raise UsageError("this Observer has ended: it observes once. Make a new one.")
        self.recorder = Recorder(self._clock)
        self._ddp.observe(self)
        try:
            for sink in self._sinks:
                sink.open(self._rank)
            self._began_ns = self._clock()
            self._epoch_ns = time.time_ns() - self._began_ns
            if self._trace_folder is not None:
                self._trace = TraceFile(self._trace_folder, self._rank, self.recorder.thread, self._epoch_ns)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def log(self, **values: float | Tensor) -> None:
        """Add numbers to the record of the step under way, which lasts until the next one begins: ``log(loss=loss)``.

        A tensor is read at once, which makes a GPU finish what it does.
        """
        for name, value in values.items():
            self._logged[name] = float(value.item() if isinstance(value, Tensor) else value)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside, between two steps, is in no record: evaluating, saving. `log` still adds to the last."""
        paused_at = self._clock()
        with self.recorder.paused():
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
        """The first forward of a round begins: the step before is over."""
        if self._step is not None:
            ended, called = self._end_of_step(), self._clock()
            self._finish(self._step, ended, self._measure_consensus(self._step))
            self._began_ns = ended + self._clock() - called  # what observing itself took is in no record
        self._began_ns += self._paused_ns
        self._paused_ns = 0
        self._step = number

    def before_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """An optimizer is about to step, after clipping and unscaling."""
        if self._wants_gradient_norm and self._gradient_norm is None:
            gradients = [each.grad for each in parameters if each.grad is not None]
            self._gradient_norm = float(nn.utils.get_total_norm(gradients))

    def stepped(self) -> None:
        """An optimizer has stepped, and the algorithm has done what it does after it."""
        self._stepped_ns = self._clock()

    def _end_of_step(self) -> int:
        return self._clock() if self._stepped_ns is None else self._stepped_ns

    def _measure_consensus(self, step: int) -> float | None:
        if not self._consensus_every or (step + 1) % self._consensus_every != 0:
            return None
        with self.recorder.paused():
            return self._ddp.consensus_distance()

    def _finish(self, step: int, ended_ns: int, consensus_distance: float | None) -> None:
        """Write the record of the step under way."""
        began_ns = self._began_ns
        spans, so_far, waits = self.recorder.take(ended_ns)
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
            waiting=waiting if self.recorder.knows_peers else None,
            gradient_norm=self._gradient_norm,
            consensus_distance=consensus_distance,
            logged=self._logged,
        )
        self.latest = record
        self._stepped_ns = self._gradient_norm = None
        self._logged = {}
        if self._trace is not None:
            self._trace.write_step(step, began_ns, ended_ns)
            self._trace.write(spans, self.recorder.thread_names)
        for sink in self._sinks:
            sink.write(record)


_NOTHING = contextlib.nullcontext()


def exposed(observer: Observer | None, name: str) -> AbstractContextManager[None]:
    """A span in which the training thread synchronises instead of training; nothing if nobody observes."""
    return _NOTHING if observer is None else observer.recorder.span(name, exposed=True)


def exchanging(observer: Observer | None, what: str, index: int) -> AbstractContextManager[None]:
    """A span in which some thread exchanges `what`, the `index`-th of its kind; nothing if nobody observes."""
    return _NOTHING if observer is None else observer.recorder.span(f"{what} {index}", exchange=True)
