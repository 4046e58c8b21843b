"""Transports around another transport: its place in the world and its life, and every operation if wanted."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from murmura.observe.probe import Probe
from murmura.transports.base import Pairs, Transport, check_transport
from murmura.transports.checks import Tensors
from murmura.transports.endpoint import Endpoint
from murmura.transports.serial_executor import Ticket
from murmura.transports.tagged_messages import TaggedMessages
from murmura.types import ReduceOp


class TransportWrapper(Transport):
    """A transport around `inner`, which has the same ranks and is closed and aborted with it.

    Its operations run in turn and in a thread of its own, unless `inner` launches them on a GPU: then each is part of
    an operation of `inner`, and so launched by the caller, on the stream and in the order that `inner` keeps.
    """

    def __init__(self, transport: Transport) -> None:
        check_transport(transport)
        super().__init__(
            transport.rank,
            transport.world_size,
            hosts=transport.hosts,
            timeout=transport.timeout,
            name=f"{type(self).__name__}({transport.name})",
            world_ranks=transport.world_ranks,
        )
        self.inner = transport
        self._ended = threading.Event()  # set by a failure and by close, for what waits in a wrapper
        self._listeners = transport._listeners
        self.default_algorithm = transport.default_algorithm
        transport._wrappers.add(self)
        self.failure = transport.failure  # of a later one it is told

    def without_listeners(self) -> Self:
        self.inner.without_listeners()
        return super().without_listeners()

    @abstractmethod
    def wrap(self, split: Transport) -> Self:
        """The same wrapper around a channel or subgroup of the transport inside."""

    def split(self, name: str, ranks: Sequence[int] | None = None) -> Self | None:
        split = self.inner.split(name, ranks)
        if split is None:
            return None
        wrapped = self.wrap(split)
        self.keep_split(wrapped, ranks)
        return wrapped

    def host_channel(self, name: str) -> Transport:
        self.announce()
        wrapped = self.wrap(self.inner.host_channel(name))
        self.keep_split(wrapped, None)
        return wrapped

    def tagged_messages(self) -> TaggedMessages:
        return self.inner.tagged_messages()

    def observe_waiting(self, probe: Probe | None) -> None:
        self.inner.observe_waiting(probe)

    def fail(self, error: BaseException) -> bool:
        is_first = super().fail(error)
        self._ended.set()
        return is_first

    def on_abort(self, error: BaseException) -> None:
        self.inner.abort(error)

    def on_close(self) -> None:
        self._ended.set()
        self.inner.close()

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        return self.inner.allocate(numel, dtype, device)

    # What is otherwise if `inner` launches operations, which may then fail when they have returned

    @property
    def fails_later(self) -> bool:
        return self.inner.fails_later

    def first_failed(self) -> Endpoint | None:
        return super().first_failed() or self.inner.first_failed()  # there are channels of messages, which none wraps

    def run_operation(
        self, name: str, work: Callable[[], Any], async_op: bool, sent: Tensors = (), received: Tensors = ()
    ) -> Any:
        if not self.inner.fails_later:
            return super().run_operation(name, work, async_op, sent, received)
        probe = self._probe
        if probe is not None and not self._executor.runs_here():
            work = probe.operation(name, sent, work, in_background=async_op)
        return self.inner.run_operation(name, partial(self.run_in_turn, name, work), async_op, sent, received)

    def submit_job(self, what: str, work: Callable[[], Any], operation: str = "exchange") -> Ticket:
        if not self.inner.fails_later:
            return super().submit_job(what, work, operation)
        return self.inner.submit_job(what, work, operation)

    def communication_stream(self, device: torch.device) -> torch.cuda.Stream:
        if not self.inner.fails_later:
            return super().communication_stream(device)
        return self.inner.communication_stream(device)

    def await_current_stream(self) -> None:
        self.inner.await_current_stream()

    def trains_here(self) -> None:
        self.inner.trains_here()


class TransportDecorator(TransportWrapper):
    """A wrapper that hands every operation to `inner`; a subclass says in `around` what else happens."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.device = transport.device  # buckets are planned by it

    def has_spare_core(self) -> bool:
        return self.inner.has_spare_core()

    @abstractmethod
    def around(self, name: str, sent: Tensors, received: Tensors, work: Callable[[], Any]) -> Any:
        """Carry out operation `name` by calling `work`; `received` are the tensors it writes, if known before."""

    def run_operation(
        self, name: str, work: Callable[[], Any], async_op: bool, sent: Tensors = (), received: Tensors = ()
    ) -> Any:
        def run() -> Any:
            with self._listeners.heard():  # `inner` has the same ones, and this may be another thread than the caller's
                return self.around(name, sent, received, work)

        return super().run_operation(name, run, async_op, sent, received)

    # Each operation, synchronous inside, in the order of this transport

    def do_exchange(self, sends: Pairs, recvs: Pairs, timeout: float | None) -> None:
        self.inner.exchange(sends, recvs, timeout=timeout)

    def do_all_reduce(self, tensor: Tensor, op: ReduceOp, out: Tensor | None, timeout: float | None) -> Tensor:
        return self.inner.all_reduce(tensor, op, out=out, timeout=timeout)

    def do_broadcast(self, tensor: Tensor, src: int, timeout: float | None) -> Tensor:
        return self.inner.broadcast(tensor, src, timeout=timeout)

    def do_barrier(self, timeout: float | None) -> None:
        self.inner.barrier(timeout)

    def do_reduce(self, tensor: Tensor, dst: int, op: ReduceOp, timeout: float | None) -> Tensor:
        return self.inner.reduce(tensor, dst, op, timeout=timeout)

    def do_reduce_scatter(self, tensor: Tensor, op: ReduceOp, timeout: float | None) -> Tensor:
        return self.inner.reduce_scatter(tensor, op, timeout=timeout)

    def do_all_gather(self, tensor: Tensor, timeout: float | None) -> list[Tensor]:
        return self.inner.all_gather(tensor, timeout=timeout)

    def do_all_gather_into(self, out: Tensor | Tensors, tensor: Tensor, timeout: float | None) -> Tensor | Tensors:
        return self.inner.all_gather_into(out, tensor, timeout=timeout)

    def do_reduce_scatter_into(
        self, out: Tensor, tensor: Tensor | Tensors, op: ReduceOp, timeout: float | None
    ) -> Tensor:
        return self.inner.reduce_scatter_into(out, tensor, op, timeout=timeout)

    def do_gather(self, tensor: Tensor, dst: int, timeout: float | None) -> list[Tensor] | None:
        return self.inner.gather(tensor, dst, timeout=timeout)

    def do_scatter(self, tensors: Tensors | None, src: int, out: Tensor, timeout: float | None) -> Tensor:
        return self.inner.scatter(tensors, src, out=out, timeout=timeout)

    def do_all_to_all(self, sends: Tensors, recvs: Tensors, timeout: float | None) -> None:
        self.inner.all_to_all(sends, recvs, timeout=timeout)
