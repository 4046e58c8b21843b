"""The sum of sparse tensors over all ranks, which Gloo has and DDP uses for sparse gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from murmura.errors import UsageError
from murmura.transports.base import Transport
from murmura.types import ReduceOp


def check(tensor: Tensor, op: ReduceOp) -> None:
    if tensor.layout is not torch.sparse_coo or op is not ReduceOp.SUM:
        raise UsageError(
            f"all_reduce({op}) of a {tensor.layout} tensor is not defined: only sums of torch.sparse_coo tensors are. "
            "Call .to_dense() first."
        )


def all_reduce(transport: Transport, tensor: Tensor, timeout: float | None) -> None:
    """Replace `tensor` by the sum over all ranks, whose tensors may have other elements."""
    own = tensor.detach().coalesce()
    # Gathered by rows, of which ranks may have different numbers.
    indices = transport.all_gather(own.indices().t().contiguous(), timeout=timeout)
    values = transport.all_gather(own.values(), timeout=timeout)
    rows = torch.cat(indices).t()  # of tensors that are coalesced, so that they need no check; torch warns unless told
    total = torch.sparse_coo_tensor(rows, torch.cat(values), own.shape, check_invariants=False).coalesce()
    with torch.no_grad():
        tensor.copy_(total)  # the sparse tensor itself: a detached one would take other elements alone
