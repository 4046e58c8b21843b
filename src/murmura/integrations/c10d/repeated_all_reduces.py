"""Small all-reduces that were called before, found again by what torch hands over: most calls of a program are such."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import AllreduceOptions

from murmura.transports.base import Transport
from murmura.types import ReduceOp

NUM_KNOWN = 1024


class RepeatedAllReduces:
    """The all-reduces of one group that its transport can repeat."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._known: dict[tuple[Any, ...], Any] = {}

    def find(self, tensor: Tensor, opts: Any) -> Any:
        """What `Transport.run_prepared` needs for a strided tensor on the CPU; None if it cannot be repeated."""
        if type(opts) is not AllreduceOptions or not tensor.is_contiguous() or tensor.is_neg():
            return None
        return self._known.get((tensor.data_ptr(), tensor.numel(), tensor.dtype, hash(opts.reduceOp)))

    def remember(self, tensor: Tensor, opts: Any, row: Tensor, op: ReduceOp) -> None:
        """Note an all-reduce of `tensor` that has ended, for which the transport reduced `row`."""
        if type(opts) is not AllreduceOptions or row.data_ptr() != tensor.data_ptr():  # then it is a copy
            return
        prepared = self._transport.prepared_all_reduce(row, op)
        if prepared is None:
            return
        if len(self._known) >= NUM_KNOWN:
            self._known.clear()
        self._known[tensor.data_ptr(), tensor.numel(), tensor.dtype, hash(opts.reduceOp)] = prepared

    def clear(self) -> None:
        self._known.clear()
