"""The operations of a channel on a GPU, from their launch until the device has done them.

An operation is only enqueued: the host goes on, and what the same stream does next finds the result. So two things that
a waiting host would see to are seen to otherwise: a `LaunchOrder` keeps the operations of all channels in one order on
the device, and a `Watchdog` looks after them and ends one whose deadline has passed or whose peer is gone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from murmura.collectives.deadline import Deadline
from murmura.errors import UsageError
from murmura.transports.cuda_streams import OnStream, current_stream, is_done
from murmura.transports.launch_order import LaunchOrder, order_of_this_thread
from murmura.transports.serial_executor import EndedTicket, Ticket
from murmura.transports.watchdog import Watchdog

log = logging.getLogger("murmura")

SUSPECT_SECONDS = 0.5  # after which an operation that goes on makes it look for ranks that have failed
STALL_SECONDS = 10.0  # after which it warns, and each time after twice as long
QUEUED_SECONDS = 60.0  # the same for one that the device has not begun: kernels before it may take long
LEFT_SECONDS = 3.0  # after which it asks also for ranks that left: their last kernels may be a little ahead of ours


@dataclass(slots=True)
class Launch:
    """An operation that the device has not done yet."""

    operation: str
    call: str
    awaited: Sequence[int]
    timeout: float
    began: torch.cuda.Event
    launched: float  # when, by the monotonic clock
    ended: torch.cuda.Event | None = None  # None while the host is inside torch, which may be connecting to peers
    since: float | None = None  # when it was first seen to have begun
    looked: float = 0.0
    warn_after: float = STALL_SECONDS
    warn_queued_after: float = QUEUED_SECONDS

    def has_begun(self) -> bool:
        """Whether the device has begun it; as long as it is queued behind other kernels it has not."""
        if self.since is None and is_done(self.began):
            self.since = time.monotonic()
        return self.since is not None

    def has_ended(self) -> bool:
        """Whether the host has launched it and the device has done it."""
        return self.ended is not None and is_done(self.ended)

    def waited(self) -> float:
        """Seconds since it began, as far as anybody has looked."""
        return 0.0 if not self.has_begun() or self.since is None else time.monotonic() - self.since


class Launching(Protocol):
    """The transport that launches."""

    failure: BaseException | None

    def find_fault(self, launch: Launch, waited: float, *, timed_out: bool) -> BaseException | None:
        """Why `launch` does not end, if that is known or its time is up; called by the watchdog's thread."""
        ...

    def never_begun(self, launch: Launch, waited: float) -> BaseException:
        """The error of `launch`, which the device has not begun although the host has waited for it; at the end."""
        ...

    def device_failed(self, launch: Launch, error: RuntimeError) -> BaseException:
        """The error of `launch`, of which the device tells nothing any more but `error`; at the end."""
        ...

    def give_up(self, error: BaseException) -> None:
        """End all that waits on the device, because of `error`; called by the watchdog's thread, and at the end."""
        ...

    def raise_failure(self, operation: str) -> None:
        """Raise what `operation` means after the failure."""
        ...


class StreamTicket(EndedTicket):
    """An operation launched on a stream of its own; `wait` makes the current stream wait for it, not the host."""

    def __init__(self, operation: str, launches: CudaLaunches, result: Any, ended: torch.cuda.Event) -> None:
        super().__init__(operation, result)
        self._ended = ended
        self._launches = launches

    def done(self) -> bool:
        return is_done(self._ended)

    def wait(self, timeout: float | None = None) -> Any:
        """As a ticket's; with a `timeout` the host waits until the device is done."""
        if timeout is not None and not self._launches.await_event(self._ended, self._operation, timeout):
            raise self.late(timeout)
        current = torch.cuda.current_stream(self._launches.device)
        current.wait_event(self._ended)
        self._launches.raise_failure(self._operation)
        for tensor in self._result if isinstance(self._result, list) else [self._result]:
            if isinstance(tensor, Tensor) and tensor.is_cuda:  # it may have been made on the other stream
                tensor.record_stream(current)
        return self._result

    def await_end(self, seconds: float) -> bool:
        return self._launches.has_come(self._ended, seconds)


class CudaLaunches:
    """The launches of one channel of `owner`, which is held weakly."""

    def __init__(self, owner: Launching, device: torch.device) -> None:
        self.device = device
        self._order = order_of_this_thread(device)
        self._parent: CudaLaunches | None = None
        self._apart: torch.cuda.Stream | None = None  # made when it is first needed
        self._is_apart = False  # whether the operation under way runs there, and the host waits for it
        self._owner = weakref.ref(owner)
        self._pending: deque[Launch] = deque()
        self._events: list[torch.cuda.Event] = []  # of launches that are done: to make one takes longer than to use it
        self._watchdog = Watchdog(device)
        self._watchdog.watch(self)

    def follow(self, parent: CudaLaunches) -> None:
        """Share the order and the watchdog of `parent`, those of the transport that this channel was split off."""
        self._watchdog.forget(self)
        self._parent, self._watchdog = parent, parent._watchdog
        self._watchdog.watch(self)

    @property
    def order(self) -> LaunchOrder:
        """The order of what is launched here: that of the thread that trains, or else made the first transport."""
        return self._order if self._parent is None else self._parent.order

    def trains_here(self) -> None:
        """The calling thread trains: operations of this world have its order, with those of its other worlds."""
        if self._parent is not None:
            self._parent.trains_here()
        elif self._order.home != threading.get_ident():
            before, self._order = self._order, order_of_this_thread(self.device)
            self._order.continue_after(before)

    def launch(
        self, start: Callable[[None], Any], operation: str, call: str, awaited: Sequence[int], limit: float
    ) -> None:
        """Launch what `start` starts, a work of torch's or None, on the current stream; it must end within `limit`.

        It is watched from before `start`: NCCL connects two ranks when they first need it, and `start` waits for that.
        """
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                f"{operation or 'an operation'} was called while a CUDA graph is captured. Operations of murmura are "
                "watched from the host, so they cannot be part of a graph: capture what lies between them."
            )
        stream = current_stream(self.device.index)
        if not self._is_apart:
            self.order.enter(stream)
        began, ended = self._event(), self._event()
        began.record(stream)
        launch = Launch(self.named(operation), call, awaited, limit, began, time.monotonic())
        self._pending.append(launch)
        self._watchdog.wake()
        try:
            work = start(None)
            if work is not None:  # it runs on a stream of torch's own: without a time-out only this stream waits for it
                work.wait()
        finally:
            ended.record(stream)
            launch.ended = ended
        if self._is_apart:
            self.await_event(ended, operation)

    def _event(self) -> torch.cuda.Event:
        return self._events.pop() if self._events else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def run(self, what: str, work: Callable[[], Any]) -> Ticket:
        """Run `work`, which launches operations, at once: the ticket has ended when this returns."""
        order = self.order  # which another thread may exchange meanwhile
        before, order.job = order.job, what
        try:
            return EndedTicket(what, work())
        except BaseException as error:  # carried to whoever waits for the ticket
            return EndedTicket(what, error=error)
        finally:
            order.job = before

    def named(self, operation: str) -> str:
        """`operation`, and what it is for."""
        job = self.order.job
        return f"{operation} of {job}" if job else operation

    def run_beside(self, operation: str, work: Callable[[], Any], tensors: Sequence[Tensor]) -> Ticket:
        """Run `work` on the communication stream, after what the current one has to do by now."""
        side = self.order.stream
        side.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            tensor.record_stream(side)  # it may be dropped before the device has come to it
        try:
            with OnStream(side):
                result = work()
        except BaseException as error:  # carried to whoever waits for the ticket
            return EndedTicket(operation, error=error)
        return StreamTicket(operation, self, result, side.record_event())

    @contextlib.contextmanager
    def apart(self, *, with_current: bool = False) -> Iterator[None]:
        """Inside it the host waits for each operation, on a stream of this channel's own, in no order with others.

        What the host reads depends on no kernel of training, so it need not wait for any; and threads that wait on
        several channels, in another order on each rank, do not wait for each other. `with_current` if tensors of the
        current stream take part all the same.
        """
        if self._is_apart:  # already: a part of such an operation
            yield
            return
        if self._apart is None:
            self._apart = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        own, current = self._apart, torch.cuda.current_stream(self.device.index)
        if with_current:
            own.wait_stream(current)
        self._is_apart = True
        try:
            with OnStream(own):
                yield
        finally:
            self._is_apart = False
            if with_current:
                current.wait_stream(own)

    def await_event(self, event: torch.cuda.Event, operation: str, timeout: float | None = None) -> bool:
        """Let the host wait for `event`, at most `timeout` seconds; whether it came. Raises if the operation fails."""
        has_come = self.has_come(event, timeout)
        if has_come:
            self.raise_failure(operation)
        return has_come

    def has_come(self, event: torch.cuda.Event, timeout: float | None = None) -> bool:
        """Let the host wait for `event`, at most `timeout` seconds; whether it came, or will not, after a failure."""
        deadline, num_looks = Deadline(timeout), 0
        while not is_done(event):
            owner = self._owner()
            if owner is None or owner.failure is not None:
                break
            if deadline.remaining <= 0:
                return False
            num_looks += 1
            time.sleep(0 if num_looks < 50 else 0.0002)
        return True

    def raise_failure(self, operation: str) -> None:
        owner = self._owner()
        if owner is not None and owner.failure is not None:
            owner.raise_failure(operation)

    def drain(self, *, until_begun: bool = False) -> None:
        """Let the host wait until the device has done all launches, or one of them has been given up.

        If `until_begun`, it has only to have begun them. The watchdog gives up one that has begun. One that does not
        begin in its time, once it is the next, is given up here: what was queued before it does not end.
        """
        for launch in list(self._pending):
            try:
                deadline = Deadline(0.0 if self.order.is_stuck else launch.timeout)
                while not (launch.has_ended() or (until_begun and launch.has_begun())):
                    owner = self._owner()
                    if owner is None or owner.failure is not None:
                        return
                    if deadline.remaining <= 0 and not launch.has_begun():
                        self.order.not_come_to = launch.began
                        owner.give_up(owner.never_begun(launch, deadline.waited))
                        return
                    time.sleep(0.001)
            except RuntimeError as error:  # every query of an event fails after a failed assertion of a kernel
                owner = self._owner()
                if owner is not None:
                    owner.give_up(owner.device_failed(launch, error))
                return

    def look(self) -> bool:
        """Called by the watchdog: forget what is done, and end what takes too long. Whether anything is pending."""
        owner, pending = self._owner(), self._pending
        if owner is None or owner.failure is not None:
            pending.clear()
        while pending and pending[0].has_ended():
            done = pending.popleft()
            self._events += [event for event in (done.began, done.ended) if event is not None]
        if owner is None:
            return False
        if pending and not pending[0].has_begun():
            self._warn_of_queue(pending[0])
        for launch in list(pending):  # on several streams: one may wait for its turn while a later one has begun
            waited = launch.waited()
            if waited <= min(SUSPECT_SECONDS, launch.timeout / 2) or launch.has_ended():
                continue
            timed_out = waited > launch.timeout
            if timed_out or waited - launch.looked > SUSPECT_SECONDS:
                launch.looked = waited
                fault = owner.find_fault(launch, waited, timed_out=timed_out)
                if fault is not None and not launch.has_ended():
                    pending.clear()
                    owner.give_up(fault)
                    break
        return bool(pending)

    def _warn_of_queue(self, launch: Launch) -> None:
        queued = time.monotonic() - launch.launched
        if queued > launch.warn_queued_after:
            launch.warn_queued_after *= 2
            log.warning(
                "%s was launched %.0f s ago, and GPU %d has not begun it. No deadline counts until then: kernels that "
                "were queued before it take long, or do not end.",
                *(launch.operation, queued, self.device.index),
            )

    def close(self) -> None:
        self._watchdog.forget(self)
