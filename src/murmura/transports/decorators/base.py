"""What decorators share: everything goes to the transport inside, through one method that may do more."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from murmura.observe.probe import Probe
from murmura.transports.base import Pairs, Transport
from murmura.transports.checks import (
    check_all_reduce,
    check_all_to_all,
    check_broadcast,
    check_exchange,
    check_gather,
    check_reduce,
    check_reduce_scatter,
    check_scatter,
    check_timeout,
)
from murmura.types import ReduceOp

Tensors = Sequence[Tensor]


class TransportDecorator(Transport):
    """A transport that hands every operation to `inner`; a subclass says in `around` what else happens.

    Closing it closes the transport inside.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(
            transport.rank,
            transport.world_size,
            hosts=transport.hosts,
            timeout=transport.timeout,
            name=f"{type(self).__name__}({transport.name})",
            world_ranks=transport.world_ranks,
        )
        self.inner = transport
        self._listeners = transport._listeners

    def without_listeners(self) -> Self:
        self.inner.without_listeners()
        return super().without_listeners()

    @abstractmethod
    def around(self, name: str, sent: Tensors, received: Tensors, work: Callable[[], Any]) -> Any:
        """Carry out operation `name` by calling `work`; `received` are the tensors it writes, if known before."""

    @abstractmethod
    def wrap(self, split: Transport) -> Self:
        """The same decoration around a channel or subgroup of the transport inside."""

    def _do(self, name: str, sent: Tensors, received: Tensors, work: Callable[[], Any], async_op: bool) -> Any:
        return self.run_operation(name, lambda: self.around(name, sent, received, work), async_op, sent)

    def split(self, name: str, ranks: Sequence[int] | None = None) -> Self | None:
        split = self.inner.split(name, ranks)
        if split is None:
            return None
        wrapped = self.wrap(split)
        self.keep_split(wrapped, ranks)
        return wrapped

    def observe_waiting(self, probe: Probe | None) -> None:
        self.inner.observe_waiting(probe)

    def on_abort(self, error: BaseException) -> None:
        self.inner.abort(error)

    def on_close(self) -> None:
        self.inner.close()

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        return self.inner.allocate(numel, dtype, device)

    # Every operation, synchronous inside, in the order of this transport

    def exchange(self, sends: Pairs, recvs: Pairs, *, async_op: bool = False, timeout: float | None = None) -> Any:
        check_exchange(sends, recvs, timeout, self.rank, self.world_size)
        sent, received = [tensor for tensor, _ in sends], [out for out, _ in recvs]
        return self._do(
            "exchange", sent, received, lambda: self.inner.exchange(sends, recvs, timeout=timeout), async_op
        )

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        check_all_reduce(tensor, op, out, timeout)
        target = tensor if out is None else out
        return self._do(
            "all_reduce",
            [tensor],
            [target],
            lambda: self.inner.all_reduce(tensor, op, out=out, timeout=timeout),
            async_op,
        )

    def broadcast(self, tensor: Tensor, src: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        check_broadcast(tensor, src, timeout, self.world_size)
        sent, received = ([tensor], []) if self.rank == src else ([], [tensor])
        return self._do(
            "broadcast", sent, received, lambda: self.inner.broadcast(tensor, src, timeout=timeout), async_op
        )

    def barrier(self, timeout: float | None = None) -> None:
        check_timeout(timeout)
        self._do("barrier", [], [], lambda: self.inner.barrier(timeout), False)

    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        check_reduce(tensor, dst, op, timeout, self.world_size)
        sent, received = ([], [tensor]) if self.rank == dst else ([tensor], [])
        return self._do("reduce", sent, received, lambda: self.inner.reduce(tensor, dst, op, timeout=timeout), async_op)

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        check_reduce_scatter(tensor, op, timeout)
        return self._do(
            "reduce_scatter", [tensor], [], lambda: self.inner.reduce_scatter(tensor, op, timeout=timeout), async_op
        )

    def all_gather(self, tensor: Tensor, *, async_op: bool = False, timeout: float | None = None) -> Any:
        check_gather(tensor, 0, timeout, self.world_size)
        return self._do("all_gather", [tensor], [], lambda: self.inner.all_gather(tensor, timeout=timeout), async_op)

    def gather(self, tensor: Tensor, dst: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        check_gather(tensor, dst, timeout, self.world_size)
        return self._do("gather", [tensor], [], lambda: self.inner.gather(tensor, dst, timeout=timeout), async_op)

    def scatter(
        self,
        tensors: Tensors | None,
        src: int = 0,
        *,
        out: Tensor,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        check_scatter(tensors, src, out, timeout, self.rank, self.world_size)
        return self._do(
            "scatter",
            tensors or [],
            [out],
            lambda: self.inner.scatter(tensors, src, out=out, timeout=timeout),
            async_op,
        )

    def all_to_all(
        self, sends: Tensors, recvs: Tensors, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        check_all_to_all(sends, recvs, timeout, self.rank, self.world_size)
        return self._do(
            "all_to_all", sends, recvs, lambda: self.inner.all_to_all(sends, recvs, timeout=timeout), async_op
        )
