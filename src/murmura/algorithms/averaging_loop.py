"""Averages weights at fixed intervals, in a thread of its own for which training never waits."""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from murmura.errors import MurmuraError, PeerLost, PeerTimeout, TransportClosed
from murmura.transports.base import Transport
from murmura.types import ReduceOp

log = logging.getLogger("murmura")

TICK_SECONDS = 0.05
MARGIN_SECONDS = 0.5
GRACE_SECONDS = 1.5
"""How long a rank that stops waits for the others' votes before it leaves all the same."""


class _Turn(enum.Enum):
    """Whose turn it is with the flats; only that side moves on, so neither needs a lock."""

    PAUSE = "the thread's: wait for the interval to pass"
    SNAPSHOT = "training's: copy the weights at the next boundary of a round"
    AVERAGE = "the thread's: average as soon as every rank has a snapshot"
    CORRECTION = "training's: add mean - snapshot at the next boundary of a round"


class AveragingLoop:
    """Between `start` and `stop`, computes mean - snapshot every `interval` seconds.

    The ranks vote at short intervals: they average when all have a snapshot, and stop when any of them does. So a rank
    that pauses or ends holds nobody up. `snapshot` and `correction` are flats that the side whose turn it is may use.
    """

    def __init__(
        self, channel: Transport, snapshot: Sequence[Tensor], correction: Sequence[Tensor], interval: float
    ) -> None:
        self._channel = channel
        self._snapshot = snapshot
        self._correction = correction
        self._interval = interval
        self._turn = _Turn.PAUSE
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_error_told = False
        self._is_closed = False
        self._at_exit: weakref.finalize[..., AveragingLoop] | None = None
        # On a GPU the thread has a stream of its own: on that of training its votes would wait, and training for them.
        devices = {flat.device for flat in snapshot if flat.is_cuda}
        self._streams = [torch.cuda.Stream(device) for device in devices]  # type: ignore[no-untyped-call]
        self._copied: list[torch.cuda.Event] = []  # when training's stream has copied the weights

    def start(self) -> None:
        """Go on averaging; nothing happens if it goes on already."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stopping.clear()
        if self._turn is not _Turn.CORRECTION:
            self._turn = _Turn.PAUSE
        reference = weakref.ref(self)
        name = f"murmura-{self._channel.name}-rank{self._channel.rank}"
        args = (reference, self._channel)
        self._thread = threading.Thread(target=_serve, args=args, name=name, daemon=True)
        if self._at_exit is not None:
            self._at_exit.detach()
        # The thread is a daemon: a program that ends without `stop` stops here, while threads still run.
        # It holds the channel weakly, or a channel that failed would live on with its error's traceback and this loop.
        self._at_exit = weakref.finalize(self, _end, self._stopping, self._thread, weakref.ref(self._channel))
        self._thread.start()

    def stop(self) -> None:
        """Let all ranks stop after the next vote, and wait for it; idempotent. A correction on its way stays.

        Raises the error that the thread ended with, and `PeerTimeout` if it does not end.
        """
        self._stopping.set()
        if self._thread is not None:
            # An average under way is finished first. If it times out, its own error names the peer: let that come.
            self._thread.join(self._channel.timeout + MARGIN_SECONDS)
            if self._thread.is_alive():
                own = self._channel.reporter.own
                raise PeerTimeout(
                    f"rank {own} waited {self._channel.timeout:.1f} s for the average under way to end, "
                    "and it has not. Are the other ranks stuck, or is the timeout shorter than an average takes?",
                    rank=own,
                    operation="stopping the averages",
                )
        self._raise_error()

    def close(self) -> None:
        """As `stop`, but leave in any case, also if the others are stuck; the channel is of no use afterwards."""
        if self._at_exit is not None:
            self._at_exit()
        self._is_closed = True
        if self._error is not None and not self._is_error_told:  # closing must work: no error, but not silence either
            self._is_error_told = True
            log.error("averaging had failed after the last round: %s", str(self._error))  # handlers keep what they get

    def boundary(self, read: Callable[[Sequence[Tensor]], None], add: Callable[[Sequence[Tensor]], None]) -> None:
        """Called between two rounds: `add` a finished correction to the weights; `read` them for the next average."""
        self.correct(add)
        if self._turn is _Turn.SNAPSHOT:
            read(self._snapshot)
            self._copied = [torch.cuda.current_stream(stream.device).record_event() for stream in self._streams]
            self._turn = _Turn.AVERAGE

    def correct(self, add: Callable[[Sequence[Tensor]], None]) -> None:
        """`add` a finished correction to the weights, if there is one; raise the error that ended the thread."""
        if not self._is_closed:
            self._raise_error()
        if self._turn is _Turn.CORRECTION:
            add(self._correction)
            self._turn = _Turn.PAUSE

    def _raise_error(self) -> None:
        if self._error is not None:
            self._is_error_told = True
            raise self._error

    def vote(self, last: float) -> float | None:
        """One turn of the thread, given the time of the last average; returns that of the newest, or None to end."""
        if self._turn is _Turn.PAUSE and time.monotonic() - last >= self._interval:
            self._turn = _Turn.SNAPSHOT
        with contextlib.ExitStack() as current:
            for stream in self._streams:
                current.enter_context(torch.cuda.stream(stream))
            all_ready, all_go_on = _vote(self._channel, self._turn is _Turn.AVERAGE, not self._stopping.is_set())
            if not all_go_on:
                return None
            if not all_ready:
                return last
            # The copy follows the correction before on training's stream, so that has been added too.
            for stream, copied in zip(self._streams, self._copied, strict=True):
                stream.wait_event(copied)
            on_host = self._channel.device is not None and self._channel.device.type == "cpu"
            average = _mean_minus_through_host if self._streams and on_host else mean_minus
            average(self._channel, self._snapshot, self._correction)
            for stream in self._streams:
                stream.synchronize()
            if self._streams and self._channel.failed:  # broken off: what has come is no mean
                self._channel.check_usable()
        self._turn = _Turn.CORRECTION
        return time.monotonic()

    def wait(self) -> None:
        """Let a tick pass, or less if the loop is to stop."""
        self._stopping.wait(min(self._interval, TICK_SECONDS))

    def fail(self, error: BaseException) -> None:
        """Keep `error`, which ended the thread, for training to raise, unless it only means that a rank has left."""
        if isinstance(error, TransportClosed) or (isinstance(error, PeerLost) and error.left):
            log.info("averaging has ended: %s", error)
        else:
            self._error = error


def mean_minus(channel: Transport, snapshots: Sequence[Tensor], corrections: Sequence[Tensor]) -> None:
    """Overwrite each correction with the mean of all ranks' snapshots minus this rank's own."""
    for snapshot, correction in zip(snapshots, corrections, strict=True):
        correction.copy_(snapshot)
        channel.all_reduce(correction, ReduceOp.MEAN)
        correction.sub_(snapshot)


def _mean_minus_through_host(channel: Transport, snapshots: Sequence[Tensor], corrections: Sequence[Tensor]) -> None:
    """As `mean_minus` of flats on a GPU, on a channel that works in host memory: waits for the current stream alone."""
    for snapshot, correction in zip(snapshots, corrections, strict=True):
        mean = torch.empty(snapshot.shape, dtype=snapshot.dtype, pin_memory=True)
        mean.copy_(snapshot, non_blocking=True)
        torch.cuda.current_stream(snapshot.device).synchronize()
        channel.all_reduce(mean, ReduceOp.MEAN)
        correction.copy_(mean, non_blocking=True)
        correction.sub_(snapshot)


def _serve(reference: weakref.ref[AveragingLoop], channel: Transport) -> None:
    """The thread: holds the loop only while it votes, so that a model that is dropped takes its loop along."""
    last: float | None = time.monotonic()
    while last is not None:
        loop = reference()
        if loop is None:
            with contextlib.suppress(MurmuraError):
                _vote(channel, ready=False, going_on=False)
            return
        loop.wait()
        try:
            with torch.no_grad():
                last = loop.vote(last)
        except BaseException as error:  # carried to the training thread
            loop.fail(error)
            return
        del loop


def _vote(channel: Transport, ready: bool, going_on: bool) -> tuple[bool, bool]:
    """Whether all ranks are ready, and whether all go on."""
    votes = torch.tensor([ready, going_on], dtype=torch.int32)
    channel.all_reduce(votes, ReduceOp.MIN)
    all_ready, all_go_on = votes.tolist()
    return bool(all_ready), bool(all_go_on)


def _end(stopping: threading.Event, thread: threading.Thread, reference: weakref.ref[Transport]) -> None:
    stopping.set()
    channel = reference()
    if channel is None or thread is threading.current_thread():  # the thread holds the channel until it ends
        return
    thread.join(min(GRACE_SECONDS, channel.timeout))
    if thread.is_alive():  # the others do not vote: they are stuck or gone
        channel.close()
        thread.join(GRACE_SECONDS)  # a wait on a closed channel ends at once, but training's own code may not
