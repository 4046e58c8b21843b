"""BoundedStore: a store that keeps nobody waiting, whatever becomes of the process that serves it.

Torch's TCPStore waits without end for an answer if that process is stopped, or its host is gone and the connection
still stands. So a daemon thread asks the store, and whoever has a question waits for that thread for a moment at most.
"""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from murmura.transports.program_end import END_SECONDS
from murmura.transports.serial_executor import SerialExecutor, Ticket

ANSWER_SECONDS = 2.0  # for a question that takes microseconds; short beside the waits during which it is asked

SILENCE = "the store, which rank 0 or a launcher serves, does not answer"

T = TypeVar("T")


class StoreSilent(dist.DistStoreError):
    """The store has not answered in time."""


class BoundedStore:
    """`inner`, in which no question takes longer than ANSWER_SECONDS, and none waits for what nobody has set.

    While a question is overdue the store is silent, and no other waits for it: `check` finds nothing, what is set is
    written when the store answers again, and all else is a `StoreSilent`. The parts that `under` makes share a thread:
    torch's connection to the server carries one question at a time anyway.
    """

    def __init__(self, inner: Any, questions: _Questions | None = None) -> None:
        self._inner = inner
        self._questions = questions or _Questions(inner)

    @property
    def is_silent(self) -> bool:
        return self._questions.is_silent

    def under(self, prefix: str) -> BoundedStore:
        """The part whose keys begin with `prefix`."""
        return BoundedStore(part_of(self._inner, prefix), self._questions)

    def set(self, key: str, value: str | bytes) -> None:
        self._questions.tell(lambda: self._inner.set(key, value))

    def check(self, keys: Sequence[str]) -> bool:
        try:
            return self._questions.ask(lambda: bool(self._inner.check(list(keys))))
        except StoreSilent:
            return False

    def get(self, key: str) -> bytes:
        def look() -> bytes | None:
            return bytes(self._inner.get(key)) if self._inner.check([key]) else None

        value = self._questions.ask(look)
        if value is None:
            raise dist.DistStoreError(f"nobody has set {key} in the store.")
        return value

    def delete_key(self, key: str) -> bool:
        return self._questions.ask(lambda: bool(self._inner.delete_key(key)))

    def add(self, key: str, amount: int) -> int:
        return self._questions.ask(lambda: int(self._inner.add(key, amount)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._questions.ask(lambda: bytes(self._inner.compare_set(key, expected, desired)))


def part_of(store: Any, prefix: str) -> Any:
    """The part of `store`, torch's or bounded, whose keys begin with `prefix`."""
    if isinstance(store, BoundedStore):
        return store.under(prefix)
    make: Any = dist.PrefixStore  # type: ignore[attr-defined]
    return make(prefix, store)


class _Questions:
    """The thread that asks a store: one, however often the store is asked while it does not answer."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._executor = SerialExecutor("store")
        self._pid = os.getpid()  # a forked child has no such thread
        self._overdue: Ticket | None = None  # the last question that was not answered in time
        dismissal = weakref.finalize(self, self._executor.dismiss)
        dismissal.atexit = False  # transports that the program left open still have to say so then

    @property
    def is_silent(self) -> bool:
        return self._overdue is not None and not self._overdue.done()

    def ask(self, question: Callable[[], T]) -> T:
        """The answer to `question`; `StoreSilent` if it does not come, at once where an earlier one is overdue."""
        if not self.is_silent and os.getpid() == self._pid:
            return cast(T, self._result_of(self._executor.submit("a question", question)))
        raise self._silent()

    def tell(self, write: Callable[[], None]) -> None:
        """Do `write`, after those before it; waits no longer than `ask`."""
        was_silent = self.is_silent
        ticket = self._executor.submit("a write", write)
        if not was_silent:
            with contextlib.suppress(StoreSilent):
                self._result_of(ticket)

    def _result_of(self, ticket: Ticket) -> Any:
        try:
            if ticket.await_end(ANSWER_SECONDS):
                return ticket.wait()
            self._overdue = ticket
            weakref.finalize(ticket, _end_with_program, weakref.ref(ticket), self._executor, self._store, self._pid)
            raise self._silent()
        except Exception as error:
            raise error.with_traceback(None)  # noqa: B904  # which holds the ticket, and that the error
        finally:
            del ticket

    def _silent(self) -> StoreSilent:
        return StoreSilent(f"the store has not answered for {ANSWER_SECONDS:g} s.")


def _end_with_program(reference: weakref.ref[Ticket], executor: SerialExecutor, store: Any, pid: int) -> None:
    """The program ends; if the question is still open, end the wait of the thread in torch (see `program_end`).

    A forked child leaves that to its parent, whose connections it shares.
    """
    ticket = reference()
    if ticket is not None and not ticket.done() and os.getpid() == pid:
        _hang_up(store)
        executor.submit("the end", lambda: None).await_end(END_SECONDS)


def _hang_up(store: Any) -> None:
    """Break the connections of this process to the server of `store`, if it is a TCPStore: torch does not offer it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    for name in os.listdir("/dev/fd") if port and os.path.isdir("/dev/fd") else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            address = connection.getpeername()
            if isinstance(address, tuple) and address[1] == port:
                connection.shutdown(socket.SHUT_RDWR)
