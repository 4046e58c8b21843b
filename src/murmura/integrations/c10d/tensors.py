"""What torch hands to a backend, as the transport takes it: flat tensors, and operations by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from murmura.errors import UsageError
from murmura.transports.base import Transport
from murmura.transports.checks import bring_back, check_dense, describe, flatten
from murmura.types import ReduceOp

_OPS: dict[Any, ReduceOp] = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.MEAN,
    dist.ReduceOp.MIN: ReduceOp.MIN,
    dist.ReduceOp.MAX: ReduceOp.MAX,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    dist.ReduceOp.BAND: ReduceOp.BAND,
    dist.ReduceOp.BOR: ReduceOp.BOR,
    dist.ReduceOp.BXOR: ReduceOp.BXOR,
}
# The hash of an operation is its number, which torch compares in a tenth of the time of the operation itself.
_BY_NUMBER = {hash(dist.ReduceOp(kind)): ours for kind, ours in _OPS.items()}
_OF_BOOLEANS = {ReduceOp.SUM: ReduceOp.BOR, ReduceOp.PRODUCT: ReduceOp.BAND}  # what these mean for truth values


def reduce_op(op: Any, dtype: torch.dtype) -> ReduceOp:
    """Our name of torch's reduction `op` of tensors of `dtype`."""
    known = _BY_NUMBER.get(hash(op))
    if known is None:
        kind = getattr(op, "op", op)
        raise UsageError(f"the backend murmura has no {kind}. Multiply the tensor by the factor and use ReduceOp.SUM.")
    return _OF_BOOLEANS.get(known, known) if dtype is torch.bool else known


class Flat:
    """A tensor as one contiguous row of elements: a view of it, or a copy that `store` brings back."""

    def __init__(self, tensor: Tensor) -> None:
        check_dense(tensor)
        self.target = tensor.detach()
        self.row = flatten(self.target, None)

    def store(self) -> None:
        bring_back(self.row, self.target)


def flat_views(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as rows, to be read only."""
    return [Flat(tensor).row for tensor in tensors]


def split_rows(tensor: Tensor, sizes: Sequence[int], world_size: int) -> list[Tensor]:
    """Cut a tensor along its first dimension: `sizes` rows for each rank, or equal parts if none are given."""
    if not tensor.dim():
        raise UsageError("a tensor without dimensions has no rows to share out. Give it some with .view(-1).")
    if not sizes:
        if tensor.shape[0] % world_size:
            raise UsageError(
                f"the {tensor.shape[0]} rows of the tensor are no multiple of the {world_size} ranks. Pass split sizes."
            )
        sizes = [tensor.shape[0] // world_size] * world_size
    if len(sizes) != world_size or sum(sizes) != tensor.shape[0]:
        raise UsageError(f"split sizes {list(sizes)} must be {world_size} that add up to {tensor.shape[0]} rows.")
    return list(torch.split(tensor, list(sizes)))


def one_dtype(tensors: Sequence[Tensor], what: str) -> None:
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise UsageError(
            f"the tensors of one {what} must be of one dtype, not {[str(each.dtype) for each in tensors]}."
        )


def check_list(transport: Transport, tensors: Sequence[Tensor], own: Tensor, what: str) -> None:
    """Refuse a list that has not a tensor for each rank, or one in this rank's place that does not fit `own`."""
    if len(tensors) != transport.world_size:
        raise UsageError(f"{what} needs a tensor for each of the {transport.world_size} ranks, not {len(tensors)}.")
    place = tensors[transport.rank]
    if place.numel() != own.numel():
        raise UsageError(
            f"rank {transport.reporter.own} in {what}: the list has {describe(place)} in the place of this rank, but "
            f"its own tensor is {describe(own)}. Both must have as many elements."
        )


def check_arrival(transport: Transport, src: int, came: Tensor, out: Tensor) -> None:
    """Refuse a gathered tensor for which the program has given another size."""
    if came.numel() != out.numel():
        raise UsageError(
            f"rank {transport.reporter.own} in gather: {came.numel()} elements came from rank "
            f"{transport.reporter.world_rank(src)}, but the tensor for them has {out.numel()}. Give it one that fits."
        )
