"""OperationQueue: the operations of one group run one at a time, in the order they were called.

Whoever waits for an operation runs the queue up to it himself: handing a small one to another thread would cost ten
times what it takes. The queue has a thread for what nobody waits for: it starts at once on large operations and on
those with a future, and after LAZY_SECONDS on small ones, for a peer may need them before this rank waits for them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from murmura.integrations.c10d.errors import GroupPeerTimeout, as_torch_error
from murmura.integrations.c10d.work import Operation, QueuedWork
from murmura.transports.endpoint import Endpoint
from murmura.transports.forks import forked_from, guard
from murmura.transports.program_end import END_SECONDS, has_raised, reason_of_end

LAZY_SECONDS = 0.002
ACTIVE_SECONDS = 0.1  # how long the thread looks for small operations after the last one, before it sleeps
DRAIN_SECONDS = 2.0  # for queued operations to end when a group is destroyed
DRAIN_PAUSE = 0.001
TURN_SECONDS = 0.05  # between two looks of a waiting thread at whether it can run the queue itself


class OperationQueue:
    """See the module; `name` is for the thread, and `rank` what errors call this rank.

    `absent_peers` tells which ranks have not come to the operation under way, as far as anybody knows.
    """

    def __init__(self, name: str, rank: int, absent_peers: Callable[[], list[int]] = list) -> None:
        self._name, self._rank, self._absent_peers = name, rank, absent_peers
        self._pending: deque[QueuedWork] = deque()
        self._current: QueuedWork | None = None  # that somebody performs
        self._running = threading.Lock()  # held by whoever runs an operation
        self._finished = threading.Condition(threading.Lock())
        self._num_waiting = 0
        self._wakeup = threading.Event()
        self._asleep = True
        self._urgent = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False
        guard(self)

    def after_fork(self) -> None:
        """In a forked child, where the thread of the queue is not: whoever waits for an operation hears why."""
        self._running = threading.Lock()
        self._finished = threading.Condition(threading.Lock())
        self._wakeup, self._starting = threading.Event(), threading.Lock()
        self._thread, self._num_waiting, self._asleep = None, 0, True
        if self._current is not None:
            self._current.fail(forked_from(self._rank))

    @property
    def idle(self) -> bool:
        """Whether nothing is queued and nothing runs."""
        return not self._pending and not self._running.locked()

    def drain(self, seconds: float) -> bool:
        """Let what is queued end, for so long at most; whether it has."""
        until = time.monotonic() + seconds
        while not self.idle and time.monotonic() < until:
            self.wake()
            time.sleep(DRAIN_PAUSE)
        return self.idle

    def run(self, operation: Operation, timeout: float | None) -> None:
        """Run an operation in the caller's thread, after what is queued."""
        if self.run_at_once(_done, operation, timeout):
            return
        work = QueuedWork(self, lambda _: operation(timeout), ())
        self._pending.append(work)
        self.wake()
        work.wait()

    def run_at_once(self, function: Callable[..., bool], *args: Any) -> bool:
        """What `function` returns, called in its turn if that is now; else False."""
        if self._pending or not self._running.acquire(False):
            return False
        try:
            return function(*args)
        except BaseException as error:
            as_torch_error(error)
            raise
        finally:
            self._running.release()
            if self._pending:
                self.wake()

    def submit(self, work: QueuedWork, *, urgent: bool = False) -> QueuedWork:
        """Queue an operation and return it; the thread of the queue begins with it at once if it is urgent."""
        self._pending.append(work)
        if urgent:
            self.wake()
        elif self._asleep:
            self._start()
            self._wakeup.set()
        return work

    def complete(self, work: QueuedWork, timeout: float | None) -> None:
        """Return when `work` has ended; run the queue up to it, unless another thread does.

        With a timeout the thread of the queue runs it: what comes before may take longer, and cannot be left half-way.
        An interrupt of the program during an earlier operation, which fails with it, ends the wait for this one, too.
        """
        if timeout is not None:
            self.wake()
            if not self._await(work, timeout):
                raise self._late(work, timeout)
            return
        while not work.ended:
            if self._running.acquire(False):
                try:
                    while not work.ended and self._pending:
                        error = self._perform_oldest()
                        if error is not None and not isinstance(error, Exception):
                            raise error
                finally:
                    self._running.release()
                    if self._pending:
                        self.wake()
                continue
            self._await(work, TURN_SECONDS)

    def _await(self, work: QueuedWork, seconds: float) -> bool:
        """Let other threads run the queue; whether `work` has ended."""
        with self._finished:
            self._num_waiting += 1
            ended = self._finished.wait_for(lambda: work.ended, seconds)
            self._num_waiting -= 1
        return ended

    def _late(self, work: QueuedWork, timeout: float) -> GroupPeerTimeout:
        absent = self._absent_peers()
        names = ", ".join(f"rank {peer}" for peer in absent) or "a peer"
        return GroupPeerTimeout(
            f"rank {self._rank}: {work.name} on {self._name} had not ended {timeout:g} s after wait() was called: "
            f"{names} {'have' if len(absent) > 1 else 'has'} not come to it, or to one before it. It goes on: wait "
            "again, or look at what the others do. The group's own timeout ends it and names the rank.",
            rank=self._rank,
            peer=absent[0] if absent else None,
            operation=work.name,
        )

    def wake(self) -> None:
        """Let the thread of the queue run what is pending, now."""
        self._urgent = True
        self._start()
        self._wakeup.set()

    def close(self) -> None:
        """End the thread, after what is queued; the caller has ended the waits of the operations first."""
        self._closed = True
        self._absent_peers = list  # of a transport that is closed next, and may go
        self._wakeup.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def end_with_program(self, transport: Endpoint) -> None:
        """The program ends and the group was not destroyed: let what is queued end, and the thread.

        What does not end in its time, or at once if the program raised, is ended by an abort of `transport`.
        """
        if self._thread is None:
            return
        if not self.drain(0.0 if has_raised() else DRAIN_SECONDS):
            transport.abort(reason_of_end(transport.reporter, "an operation that nobody waited for"))
        self._closed = True
        self._wakeup.set()
        self._thread.join(END_SECONDS)

    def _start(self) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._serve, name=f"murmura-{self._name}", daemon=True)
                    self._thread.start()

    def _serve(self) -> None:
        active_until = 0.0
        seen: QueuedWork | None = None  # the oldest operation at the last look
        while not (self._closed and not self._pending):
            now = time.monotonic()
            oldest = self._oldest()
            if oldest is not None:
                active_until = now + ACTIVE_SECONDS
                if self._closed or self._urgent or oldest is seen:
                    seen = oldest = None
                    self._urgent = False
                    self._run_pending()
                    continue
            seen = oldest
            if oldest is not None or now < active_until:
                self._wakeup.wait(LAZY_SECONDS)
            else:
                self._asleep = True
                if not self._pending and not self._closed:
                    self._wakeup.wait()
                self._asleep = False
                active_until = time.monotonic() + ACTIVE_SECONDS
            self._wakeup.clear()

    def _oldest(self) -> QueuedWork | None:
        try:
            return self._pending[0]
        except IndexError:  # perhaps this very moment
            return None

    def _run_pending(self) -> None:
        with self._running:
            while self._pending:
                self._perform_oldest()

    def _perform_oldest(self) -> BaseException | None:
        """Perform the oldest operation, holding `_running`, and return its error; nothing else of it is kept alive."""
        self._current = work = self._pending.popleft()
        work.perform()
        self._current = None
        if self._num_waiting:
            with self._finished:
                self._finished.notify_all()
        return work.error


def _done(operation: Operation, timeout: float | None) -> bool:
    operation(timeout)
    return True


def end_with_program(queue: weakref.ref[OperationQueue], transport: weakref.ref[Endpoint]) -> None:
    """See the method; for `weakref.finalize`, which also calls it when a queue was dropped: it then has no thread."""
    still, channel = queue(), transport()
    if still is not None and channel is not None:
        still.end_with_program(channel)
