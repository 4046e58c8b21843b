"""Runs exchanges that are pending because an optimizer's step was skipped, when weights may be written."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable

from murmura.algorithms import AlgorithmImpl
from murmura.ddp.backward_tracker import BackwardTracker
from murmura.ddp.replica import ModelReplica
from murmura.ddp.round import Round
from murmura.errors import MurmuraError

CLOSE_SECONDS = 1.0
"""How long a model that is closed waits for the others while an exception is handled: they may never come."""


class Settling:
    """Runs, between rounds, what `algorithm` has pending, and a broadcast of buffers that a round left out."""

    algorithm: AlgorithmImpl

    def __init__(self, replica: ModelReplica, round_: Round, backward: BackwardTracker) -> None:
        self._replica = replica
        self._round = round_
        self._backward = backward
        self._thread: int | None = None  # the user's, which trains
        self.seen()
        self._is_settling = False
        self.buffers_pending = False
        self.buffer_source = 0  # the rank whose buffers the others take over

    def seen(self) -> None:
        """Note that the calling thread is the one that trains."""
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            self._replica.transport.trains_here()

    def settle(self) -> None:
        """Run what the last round left pending because a step was skipped; does nothing inside a round."""
        if self._round.is_idle:
            self._once(self.algorithm.settle)
            self._once(self.broadcast_pending_buffers)

    def refuse_after_failure(self, what: str, *, if_undefined: bool = False) -> None:
        """Raise if an exchange has failed; `if_undefined` only if that was after its launch on a GPU.

        Then all results since the launch are undefined. Otherwise they may still be saved. What is under way on a GPU
        is waited for then: it could fail when the state has been handed out, and before it is copied to the host.
        """
        transport = self._replica.transport
        if if_undefined:
            transport.await_current_stream()
        failed = transport.first_failed()  # algorithms exchange on channels of their own
        if failed is not None and (failed.fails_later or not if_undefined):
            failed.check_usable(what)

    def before_collective(self) -> None:
        """The user is about to wait for all ranks, which may wait for an exchange that is pending here."""
        # No operation in a communication thread is the user's own, nor is one inside a backward.
        if threading.get_ident() == self._thread and not self._backward.is_running:
            self._once(self.algorithm.before_collective)

    def settle_at_close(self) -> bool:
        """As `settle`; while an exception is handled, within a short time only. Whether all has gone well."""
        if self._replica.transport.first_failed() is not None:
            return False
        if sys.exc_info()[0] is None:
            self.settle()
            return True
        settling = threading.Thread(target=self._try_to_settle, daemon=True)
        settling.start()
        settling.join(CLOSE_SECONDS)
        return False

    def raise_unheard(self) -> None:
        """Raise, at the end of closing, the failure of an exchange that no call has raised; not beside another error.

        It came after the exchange had been launched on a GPU. A program would end well on weights that are undefined.
        """
        failed = self._replica.transport.first_failed()
        if failed is None or sys.exc_info()[0] is not None:
            return
        if isinstance(failed.failure, MurmuraError) and failed.failure.is_unheard:
            failed.check_usable("close()")

    def broadcast_pending_buffers(self) -> None:
        """Take over the buffers of rank 0, or in a join of one that has data, if that is pending."""
        if self.buffers_pending:
            self.buffers_pending = False
            self._replica.broadcast(self._replica.buffers, self.buffer_source)

    def _try_to_settle(self) -> None:
        with contextlib.suppress(MurmuraError):  # another exception is being handled already
            self.settle()

    def _once(self, work: Callable[[], None]) -> None:
        """Run `work`, which may call collectives that are announced to this object."""
        if not self._is_settling:
            self._is_settling = True
            try:
                work()
            finally:
                self._is_settling = False
