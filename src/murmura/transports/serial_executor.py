"""SerialExecutor: the operations of one channel run one at a time, in the order they were called.

A synchronous call runs inline in the caller's thread when nothing is queued. Asynchronous ones run in the
channel's communication thread, started at the first of them, and hand back a `Ticket`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from murmura.errors import PeerTimeout
from murmura.transports.checks import check_timeout

__all__ = ["EndedTicket", "SerialExecutor", "Ticket"]


class Ticket:
    """An operation under way; its tensors belong to the transport until `wait` returns."""

    def __init__(self, operation: str) -> None:
        self.watch: Callable[[], Callable[[], None]] | None = None  # what it returns is called once a second of `wait`
        self._operation = operation
        self._finished = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the operation has ended, well or badly; never blocks."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the operation has ended; return its result or raise its error.

        The operation has a deadline of its own. `timeout` bounds this call only: when it passes, `PeerTimeout` is
        raised, the operation goes on, and `wait` may be called again.
        """
        if timeout != 0:  # which asks whether it has ended
            check_timeout(timeout)
        if timeout is None and self.watch is not None:
            check = self.watch()
            while not self._finished.wait(1.0):
                check()
        elif not self._finished.wait(timeout):
            raise self.late(timeout)
        if self._error is not None:
            raise self._error
        return self._result

    def late(self, timeout: float | None) -> PeerTimeout:
        """The error of a `wait` that has lasted for `timeout` seconds."""
        return PeerTimeout(
            f"{self._operation} had not ended {timeout:g} s after wait() was called; it goes on. "
            "Wait again, or give the operation itself a shorter timeout.",
            operation=self._operation,
        )

    def await_end(self, seconds: float) -> bool:
        """Block for at most `seconds`; whether the operation has ended. Raises nothing."""
        return self._finished.wait(seconds)

    def finish(self, result: Any) -> None:
        self._result = result
        self._finished.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._finished.set()


class EndedTicket(Ticket):
    """An operation that ended before its ticket was handed out."""

    def __init__(self, operation: str, result: Any = None, error: BaseException | None = None) -> None:
        self.watch = None
        self._operation = operation
        self._result = result
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def await_end(self, seconds: float) -> bool:
        return True


class SerialExecutor:
    """Runs the operations of one channel; `lock` is held by whichever thread runs one now."""

    def __init__(self, name: str) -> None:
        self.lock = threading.Lock()
        self._name = name
        self._owner = 0  # ident of the thread that runs an operation
        self._jobs: queue.SimpleQueue[tuple[Ticket, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current: Ticket | None = None  # of the job that the communication thread does
        self._submitting = threading.Lock()
        self._num_submitted = 0
        self._num_finished = 0  # written by the communication thread alone
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, so that a synchronous call may run inline."""
        return self._num_submitted == self._num_finished

    @property
    def is_running(self) -> bool:
        """Whether the communication thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def in_thread(self) -> bool:
        """Whether the caller is the communication thread, which must never spin: it would hold the GIL."""
        return threading.current_thread() is self._thread

    def runs_here(self) -> bool:
        """Whether the caller's thread is the one that runs an operation now."""
        return self._owner == threading.get_ident()

    def run(self, work: Callable[[], Any]) -> Any:
        """Run an operation after what is queued and return its result; inside another one, or a job, at once.

        It runs in the caller's thread, which has its CUDA stream, autocast and inference mode.
        """
        if self.runs_here():
            return work()
        if not self.idle and not self.in_thread():
            self.submit("operation", _nothing).wait()
        return self._perform(work)

    def submit(self, operation: str, work: Callable[[], Any]) -> Ticket:
        """Queue a job for the communication thread: `work`, which may `run` operations.

        After `close` it is done, or refuses, at once; and so it is inside another job, which would wait for itself.
        """
        ticket = Ticket(operation)
        if self.in_thread():
            self._settle(ticket, work)
            return ticket
        with self._submitting:
            if not self._closed:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name=f"murmura-{self._name}", daemon=True)
                    self._thread.start()
                self._num_submitted += 1
                self._jobs.put((ticket, work))
                return ticket
        self._settle(ticket, work)  # without the lock: `work` may run an operation, which comes here again
        return ticket

    def run_job(self, operation: str, work: Callable[[], Any]) -> Ticket:
        """Do a job in the caller's thread; its operations run after what is queued."""
        ticket = Ticket(operation)
        self._settle(ticket, work)
        return ticket

    def close(self) -> None:
        """Let the communication thread finish what is queued, then end it. The caller has ended its waits first."""
        with self._submitting:
            self._closed = True
        thread = self._thread
        if thread is not None and not self.in_thread():
            self.dismiss()
            thread.join()
            self._thread = None

    def dismiss(self) -> None:
        """Let the communication thread end after what is queued; waits for nothing."""
        self._jobs.put(None)

    def end(self, seconds: float) -> None:
        """As `close`, but wait for so long at most."""
        with self._submitting:
            self._closed = True
        if self._thread is not None and not self.in_thread():
            self.dismiss()
            self._thread.join(seconds)

    def fail_all(self, error: BaseException) -> None:
        """Fail what the communication thread does and what is queued; in a forked child, which has no such thread."""
        current = self._current
        if current is not None and not current.done():
            current.fail(error)
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job[0].fail(error)

    def _perform(self, work: Callable[[], Any]) -> Any:
        with self.lock:
            self._owner = threading.get_ident()
            try:
                return work()
            finally:
                self._owner = 0

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._current = job[0]
            self._settle(*job, in_thread=True)
            self._current = None
            del job  # until the next one comes, nothing of this one is kept alive

    def _settle(self, ticket: Ticket, work: Callable[[], Any], *, in_thread: bool = False) -> None:
        try:
            result = work()
        except BaseException as error:  # carried to whoever waits for the ticket
            self._num_finished += in_thread
            ticket.fail(error)
        else:
            self._num_finished += in_thread
            ticket.finish(result)


def _nothing() -> None:
    """What is queued to wait for all that was queued before."""
