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

from murmura.errors import MurmuraError, PeerLost, TransportError, UsageError
from murmura.transports import group_operations, profiling
from murmura.transports.base import Transport
from murmura.transports.checks import Tensors, describe_call
from murmura.transports.cuda_launches import LEFT_SECONDS, CudaLaunches, Launch
from murmura.transports.cuda_streams import current_stream
from murmura.transports.profiling import is_profiled
from murmura.transports.serial_executor import Ticket
from murmura.types import ReduceOp

log = logging.getLogger("murmura")

UNDEFINED = (
    "The exchange was broken off on the GPU: what it wrote, and all that was computed from it since, is undefined. "
    "Load a checkpoint; these weights must not be trained on or saved."
)


class LaunchingTransport(Transport):
    """A transport whose operations are launched if `launches` is set, by its constructor, and else run as ever."""

    launches: CudaLaunches | None = None

    @property
    def fails_later(self) -> bool:
        return self.launches is not None

    @abstractmethod
    def known_cause(self, launch: Launch, waited: float) -> BaseException | None:
        """The error that a peer's exit notice or death means to `launch`, if there is one."""

    @abstractmethod
    def explain_delay(self, launch: Launch, waited: float) -> BaseException:
        """The error of `launch`, whose time is up."""

    _group: Any

    @abstractmethod
    def await_works(self, start: Callable[[timedelta | None], Any], timeout: float | None) -> None:
        """Start works of the group and wait for all of them, or launch them."""

    def run_operation(
        self, name: str, work: Callable[[], Any], async_op: bool, sent: Tensors = (), received: Tensors = ()
    ) -> Any:
        if self.launches is None:
            return super().run_operation(name, work, async_op, sent, received)
        tensors = [*sent, *received]
        self._refuse_other_gpus(tensors)
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

    def _refuse_other_gpus(self, tensors: Sequence[Tensor]) -> None:
        """There nobody would watch the operation, and it would be in no order with the others."""
        assert self.launches is not None
        own = self.launches.device
        for tensor in tensors:
            if tensor.is_cuda and tensor.get_device() != own.index:
                raise UsageError(
                    f"rank {self.reporter.own}: a tensor is on {tensor.device}, and this transport works on {own}. "
                    f"Move it there first: tensor.to({str(own)!r})."
                )

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

    # Collectives that the group itself has on a GPU

    def all_reduce_own(self, flat: Tensor, op: ReduceOp) -> None:
        is_usual = self.world_size > 1 and self._probe is None and not is_profiled()
        if self.launches is None or not is_usual or not flat.is_cuda:  # of a bucket in host memory, it is staged
            super().all_reduce_own(flat, op)
            return
        self.announce()
        call = describe_call("all_reduce", op, flat)
        self.run_in_turn("all_reduce", lambda: self.all_reduce_flat(flat, flat, op, call, None))

    def do_all_to_all(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], timeout: float | None) -> None:
        if self.launches is None or not all(map(group_operations.is_raw_on_cuda, (*sends, *recvs))):
            super().do_all_to_all(sends, recvs, timeout)
            return
        self.compare_calls("all_to_all()", timeout)
        options = self._limited(group_operations.all_to_all_options(), None)
        outgoing, incoming = ([group_operations.raw(each) for each in tensors] for tensors in (sends, recvs))
        self.await_works(lambda limit: self._group.alltoall(incoming, outgoing, options), timeout)

    def all_gather_flat(self, parts: Sequence[Tensor], own: Tensor, call: str, timeout: float | None) -> None:
        if self.launches is None:
            super().all_gather_flat(parts, own, call, timeout)
            return
        self.compare_calls(call, timeout)
        options = self._limited(group_operations.all_gather_options(), None)
        whole = group_operations.side_by_side(parts)
        target = own.new_empty(own.numel() * len(parts)) if whole is None else whole
        pair = group_operations.raw(target), group_operations.raw(own)
        self.await_works(lambda limit: self._group._allgather_base(*pair, options), timeout)
        if whole is None:
            for part, came in zip(parts, target.chunk(len(parts)), strict=True):
                part.copy_(came)

    def _all_reduce_options(self, op: Any, limit: timedelta | None) -> Any:
        if self.launches is not None:
            return group_operations.launched_all_reduce_options(op)
        return self._limited(group_operations.all_reduce_options(op), limit)

    def _limited(self, options: Any, limit: timedelta | None) -> Any:
        """`options` of torch's for an operation that may take as long as `limit`."""
        if self.launches is None:
            options.timeout = limit
        else:  # on the current stream; how long it may take is the watchdog's business
            group_operations.on_current_stream(options)
        return options

    def trains_here(self) -> None:
        if self.launches is not None:
            self.launches.trains_here()

    def communication_stream(self, device: torch.device) -> torch.cuda.Stream:
        return super().communication_stream(device) if self.launches is None else self.launches.order.stream

    def await_current_stream(self) -> None:
        if self.launches is not None:
            self.launches.await_event(current_stream(self.launches.device.index).record_event(), self.operation)

    # What the watchdog calls, in its thread, and what closes; see `Launching`

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

    def never_begun(self, launch: Launch, waited: float) -> BaseException:
        own = self.reporter.own
        words = (
            f"rank {own} closed its transport and waited {waited:.1f} s for {launch.operation}, which its GPU has not "
            "begun: a kernel that was queued before it does not end."
        )
        return TransportError(words, rank=own, operation=launch.operation)

    def device_failed(self, launch: Launch, error: RuntimeError) -> BaseException:
        own = self.reporter.own
        words = (
            f"rank {own} closed its transport and cannot learn whether {launch.operation} has ended, for its GPU has "
            f"failed: {str(error).splitlines()[0]}. Run with CUDA_LAUNCH_BLOCKING=1 to find the kernel."
        )
        return TransportError(words, rank=own, operation=launch.operation)

    def give_up(self, error: BaseException) -> None:
        if isinstance(error, TransportError):
            told, words = error, f"{error} {UNDEFINED}"
            error = type(told)(words, rank=told.rank, peer=told.peer, operation=told.operation)
            error.cause = told.cause
        else:
            error.add_note(UNDEFINED)
        if isinstance(error, MurmuraError):
            error.is_unheard = True
        log.error("%s", error)  # after the last operation of a program nothing is left that could raise it
        self.abort(error)

    def raise_failure(self, operation: str) -> None:
        assert self.failure is not None
        raise self.reporter.again(self.failure, operation) from self.failure
