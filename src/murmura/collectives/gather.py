"""Gather, scatter and their kin over `exchange`: every rank talks to every other at once, in one or two rounds.

Results come as new tensors on the input's device. First dimensions may differ between ranks where a list of tensors
comes back; dtype and the other dimensions may not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from murmura.collectives.chunks import chunk_bounds
from murmura.collectives.deadline import Deadline
from murmura.collectives.protocols import PointToPoint
from murmura.collectives.reduction import Reduction
from murmura.types import ReduceOp

_BLOCK_BYTES = 4 * 2**20  # rank dst of a reduce holds this much of every rank at a time


def _peers(ranks: PointToPoint) -> list[int]:
    return [rank for rank in range(ranks.world_size) if rank != ranks.rank]


def reduce(ranks: PointToPoint, flat: Tensor, dst: int, op: ReduceOp, *, timeout: float | None = None) -> None:
    """Reduce `flat` over all ranks into rank `dst`'s, in rank order; the others' stay as they are."""
    deadline = Deadline(timeout)
    reduction = Reduction(op, flat.dtype, ranks.world_size, flat.device)
    step = _BLOCK_BYTES // flat.element_size()
    for start in range(0, max(1, flat.numel()), step):
        block = flat[start : start + step]
        if ranks.rank != dst:
            ranks.exchange([(block, dst)], [], timeout=deadline.left())
            continue
        inputs = [block.clone() if rank == dst else torch.empty_like(block) for rank in range(ranks.world_size)]
        ranks.exchange([], [(inputs[peer], peer) for peer in _peers(ranks)], timeout=deadline.left())
        reduction.reduce([reduction.array(each) for each in inputs], reduction.array(block))


def reduce_scatter(ranks: PointToPoint, flat: Tensor, op: ReduceOp, *, timeout: float | None = None) -> Tensor:
    """Reduce `flat` over all ranks, in rank order, and return the chunk of this rank."""
    size = ranks.world_size
    chunks = [flat[slice(*chunk_bounds(flat.numel(), size, index))] for index in range(size)]
    out = torch.empty_like(chunks[ranks.rank])
    reduce_scatter_into(ranks, out, chunks, op, timeout=timeout)
    return out


def reduce_scatter_into(
    ranks: PointToPoint, out: Tensor, parts: Sequence[Tensor], op: ReduceOp, *, timeout: float | None = None
) -> None:
    """Reduce every rank's part number r into the `out` of rank r, in rank order; it overlaps no part."""
    inputs = [part if peer == ranks.rank else torch.empty_like(out) for peer, part in enumerate(parts)]
    peers = _peers(ranks)
    ranks.exchange([(parts[peer], peer) for peer in peers], [(inputs[peer], peer) for peer in peers], timeout=timeout)
    reduction = Reduction(op, out.dtype, ranks.world_size, out.device)
    reduction.reduce([reduction.array(each) for each in inputs], reduction.array(out))


def all_gather_into(ranks: PointToPoint, parts: Sequence[Tensor], own: Tensor, *, timeout: float | None = None) -> None:
    """Fill part number r from rank r's `own`; all are of one size."""
    peers = _peers(ranks)
    ranks.exchange([(own, peer) for peer in peers], [(parts[peer], peer) for peer in peers], timeout=timeout)
    parts[ranks.rank].copy_(own)


def all_gather(ranks: PointToPoint, tensor: Tensor, *, timeout: float | None = None) -> list[Tensor]:
    """Every rank's tensor, in rank order."""
    deadline, peers = Deadline(timeout), _peers(ranks)
    lengths = {peer: torch.zeros(1, dtype=torch.int64, device=tensor.device) for peer in peers}
    own = _length(tensor)
    ranks.exchange([(own, peer) for peer in peers], [(lengths[peer], peer) for peer in peers], timeout=deadline.left())
    gathered = [
        tensor.clone() if rank == ranks.rank else _sized(tensor, lengths[rank]) for rank in range(ranks.world_size)
    ]
    ranks.exchange(
        [(gathered[ranks.rank], peer) for peer in peers],
        [(gathered[peer], peer) for peer in peers],
        timeout=deadline.left(),
    )
    return gathered


def gather(ranks: PointToPoint, tensor: Tensor, dst: int, *, timeout: float | None = None) -> list[Tensor] | None:
    """Every rank's tensor, in rank order, on rank `dst`; None elsewhere."""
    deadline = Deadline(timeout)
    if ranks.rank != dst:
        ranks.exchange([(_length(tensor), dst)], [], timeout=deadline.left())
        ranks.exchange([(tensor, dst)], [], timeout=deadline.left())
        return None
    peers = _peers(ranks)
    lengths = {peer: torch.zeros(1, dtype=torch.int64, device=tensor.device) for peer in peers}
    ranks.exchange([], [(lengths[peer], peer) for peer in peers], timeout=deadline.left())
    gathered = [tensor.clone() if rank == dst else _sized(tensor, lengths[rank]) for rank in range(ranks.world_size)]
    ranks.exchange([], [(gathered[peer], peer) for peer in peers], timeout=deadline.left())
    return gathered


def scatter(
    ranks: PointToPoint, tensors: Sequence[Tensor] | None, src: int, out: Tensor, *, timeout: float | None = None
) -> None:
    """Fill `out` with this rank's entry of rank `src`'s `tensors`."""
    if ranks.rank != src:
        ranks.exchange([], [(out, src)], timeout=timeout)
        return
    assert tensors is not None
    ranks.exchange([(tensors[peer], peer) for peer in _peers(ranks)], [], timeout=timeout)
    out.copy_(tensors[src])


def all_to_all(
    ranks: PointToPoint, sends: Sequence[Tensor], recvs: Sequence[Tensor], *, timeout: float | None = None
) -> None:
    """Send sends[r] to rank r and fill recvs[r] from rank r."""
    peers = _peers(ranks)
    ranks.exchange([(sends[peer], peer) for peer in peers], [(recvs[peer], peer) for peer in peers], timeout=timeout)
    recvs[ranks.rank].copy_(sends[ranks.rank])


def _length(tensor: Tensor) -> Tensor:
    return torch.tensor([tensor.shape[0] if tensor.dim() else 1], device=tensor.device)


def _sized(like: Tensor, length: Tensor) -> Tensor:
    shape = (int(length), *like.shape[1:]) if like.dim() else ()
    return torch.empty(shape, dtype=like.dtype, device=like.device)
