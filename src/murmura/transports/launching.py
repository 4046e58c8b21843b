"""LaunchingTransport: what a transport adds if its operations are launched on a GPU instead of waited for.

With `launches` an operation on CUDA tensors returns when it is enqueued; the current stream waits for it, not the host.
Nothing runs in a communication thread then: launches happen where they are called, in the order of the program. The
host waits only where it reads what comes: tensors in host memory, `barrier`, compared calls.
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from murmura.errors import PeerLost, TransportError
from murmura.transports import profiling
from murmura.transports.base import Transport
from murmura.transports.cuda_launches import LEFT_SECONDS, CudaLaunches, Launch
from murmura.transports.profiling import is_profiled
from murmura.transports.serial_executor import Ticket

log = logging.getLogger("murmura")

UNDEFINED = (
    "The exchange was broken off on the GPU: what it wrote, and all that was computed from it since, is undefined. "
    "Load a checkpoint; these weights must not be trained on or saved."
)


class LaunchingTransport(Transport):
    """A transport whose operations are launched if `launches` is set, by its constructor, and else run as ever."""

    launches: CudaLaunches | None = None

    @abstractmethod
    def known_cause(self, launch: Launch, waited: float) -> BaseException | None:
        """The error that a peer's exit notice or death means to `launch`, if there is one."""

    @abstractmethod
    def explain_delay(self, launch: Launch, waited: float) -> BaseException:
        """The error of `launch`, whose time is up."""

    @abstractmethod
    def _break_off(self) -> None:
        """End what waits in a group of our own; a group that was handed over may be in use elsewhere."""

    def run_operation(
        self,
        name: str,
        work: Callable[[], Any],
        async_op: bool,
        sent: Sequence[Tensor] = (),
        received: Sequence[Tensor] = (),
    ) -> Any:
        if self.launches is None:
            return super().run_operation(name, work, async_op, sent, received)
        tensors = [*sent, *received]
        if not all(tensor.is_cuda for tensor in tensors):
            return super().run_operation(name, partial(self._run_staged, work, tensors), async_op, sent, received)
        if not async_op:
            return super().run_operation(name, work, False, sent, received)
        if name != "exchange":
            self.announce()  # on the current stream, on which listeners may write weights
        probe = self._probe
        if probe is not None and not self._executor.runs_here():
            work = probe.operation(name, sent, work, in_background=True)
        run = partial(self.run_in_turn, name, work)
        with profiling.event(name) if is_profiled() else contextlib.nullcontext():
            return self.launches.run_beside(f"{name} on rank {self.reporter.own}", run, tensors)

    def _run_staged(self, work: Callable[[], Any], tensors: Sequence[Tensor]) -> Any:
        with self.host_waiting(with_current=any(tensor.is_cuda for tensor in tensors)):
            return work()

    def submit_job(self, what: str, work: Callable[[], Any], operation: str = "exchange") -> Ticket:
        if self.launches is None:
            return super().submit_job(what, work, operation)
        if not is_profiled():
            return self.launches.run(what, work)
        with profiling.event(operation):
            return self.launches.run(what, work)

    def host_waiting(self, *, with_current: bool = False) -> AbstractContextManager[None]:
        """Inside it the host waits for the device, because it reads what comes; see `CudaLaunches.apart`."""
        return contextlib.nullcontext() if self.launches is None else self.launches.apart(with_current=with_current)

    def _limited(self, options: Any, limit: timedelta | None) -> Any:
        """`options` of torch's for an operation that may take as long as `limit`."""
        if self.launches is None:
            options.timeout = limit
        else:  # on the current stream; how long it may take is the watchdog's business
            options.asyncOp = False
        return options

    def communication_stream(self, device: torch.device) -> torch.cuda.Stream:
        return super().communication_stream(device) if self.launches is None else self.launches.order.stream

    def keep_own_order(self) -> None:
        if self.launches is not None:
            self.launches.keep_own_order()

    # What the watchdog calls, in its thread; see `Launching`

    def find_fault(self, launch: Launch, waited: float, *, timed_out: bool) -> BaseException | None:
        if timed_out:
            return self.explain_delay(launch, waited)
        if waited > launch.warn_after:
            launch.warn_after *= 2
            log.warning(
                "rank %d has waited %.0f s for %s in %s; it gives up after %.0f s.",
                self.reporter.own, waited, ", ".join(f"rank {each}" for each in self.reporter.names(launch.awaited)),
                launch.operation, launch.timeout,
            )  # fmt: skip
        cause = self.known_cause(launch, waited)
        return None if isinstance(cause, PeerLost) and cause.left and waited < LEFT_SECONDS else cause

    def give_up(self, error: BaseException) -> None:
        if isinstance(error, TransportError):
            told, words = error, f"{error} {UNDEFINED}"
            error = type(told)(words, rank=told.rank, peer=told.peer, operation=told.operation)
            error.cause = told.cause
        self.abort(error)

    def raise_failure(self, operation: str) -> None:
        assert self.failure is not None
        raise self.reporter.again(self.failure, operation) from self.failure
