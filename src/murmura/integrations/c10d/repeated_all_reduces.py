"""Small all-reduces that were called before, found again by what torch hands over: most calls of a program are such.

A tensor at another address needs only views of its memory, once one with as many elements of its dtype was reduced.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed import AllreduceOptions

from murmura.transports.base import Transport
from murmura.types import ReduceOp

NUM_KNOWN = 1024
NOWHERE = 0  # the address of no tensor that has elements


class RepeatedAllReduces:
    """The all-reduces of one group that its transport can repeat."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._known: dict[tuple[Any, ...], dict[int, Any]] = {}  # of each kind, by address; one of them at NOWHERE too
        self._num_known = 0

    def find(self, tensor: Tensor, opts: Any) -> Any:
        """What `Transport.run_prepared` needs for a strided tensor on the CPU; None if it cannot be repeated."""
        if type(opts) is not AllreduceOptions or not tensor.is_contiguous() or tensor.is_neg():
            return None
        known = self._known.get((tensor.numel(), tensor.dtype, hash(opts.reduceOp)))
        if known is None:
            return None
        address = tensor.data_ptr()
        prepared = known.get(address)
        if prepared is None:
            prepared = self._transport.prepared_elsewhere(known[NOWHERE], address)
            self._keep(tensor, opts, prepared)
        return prepared

    def remember(self, tensor: Tensor, opts: Any, row: Tensor, op: ReduceOp) -> None:
        """Note an all-reduce of `tensor` that has ended, for which the transport reduced `row`."""
        if type(opts) is not AllreduceOptions or row.data_ptr() != tensor.data_ptr():  # then it is a copy
            return
        prepared = self._transport.prepared_all_reduce(row, op)
        if prepared is None:
            return
        self._keep(tensor, opts, prepared)

    def _keep(self, tensor: Tensor, opts: Any, prepared: Any) -> None:
        if self._num_known >= NUM_KNOWN:
            self.clear()
        kind = tensor.numel(), tensor.dtype, hash(opts.reduceOp)
        self._known.setdefault(kind, {NOWHERE: prepared})[tensor.data_ptr()] = prepared
        self._num_known += 1

    def clear(self) -> None:
        self._known.clear()
        self._num_known = 0
