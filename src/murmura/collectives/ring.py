"""Collectives over nothing but `exchange`, so that every transport has them.

Terms: a `flat` buffer, one `chunk` of it per rank, `left` and `right` the neighbours on the ring. Every function
takes a contiguous one-dimensional tensor and works in place; `timeout` bounds the whole collective.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from murmura.collectives.chunks import chunk_bounds, is_small
from murmura.collectives.deadline import Deadline
from murmura.collectives.protocols import PointToPoint, Streaming
from murmura.collectives.reduction import Reduction, check_reducible
from murmura.types import ReduceOp

TINY_BYTES = 4 * 1024
"""Up to this many, one message to every rank takes less time than two of a part of it."""


def all_reduce(
    ranks: PointToPoint, flat: Tensor, op: ReduceOp | str = ReduceOp.SUM, *, timeout: float | None = None
) -> None:
    """Reduce `flat` over all ranks, in place; every rank ends with the same bits."""
    op = check_reducible(op, flat.dtype)
    if ranks.world_size == 1:
        return
    deadline = Deadline(timeout)
    reduction = Reduction(op, flat.dtype, ranks.world_size, flat.device)
    if is_small(flat.numel() * flat.element_size(), ranks.world_size):
        _reduce_in_rank_order(ranks, flat, reduction, deadline)
    else:
        _reduce_round_the_ring(ranks, flat, reduction, deadline)
        _gather_round_the_ring(ranks, flat, deadline)


def _reduce_in_rank_order(ranks: PointToPoint, flat: Tensor, reduction: Reduction, deadline: Deadline) -> None:
    """Everything goes to everyone, or, if it is not tiny, chunk r to rank r and its sum to everyone: fewer bytes."""
    if flat.numel() * flat.element_size() > TINY_BYTES:
        _reduce_chunks_in_rank_order(ranks, flat, reduction, deadline)
        return
    inputs = [flat.clone() if rank == ranks.rank else torch.empty_like(flat) for rank in range(ranks.world_size)]
    peers = [rank for rank in range(ranks.world_size) if rank != ranks.rank]
    ranks.exchange(
        [(inputs[ranks.rank], peer) for peer in peers],
        [(inputs[peer], peer) for peer in peers],
        timeout=deadline.left(),
    )
    reduction.reduce([reduction.array(each) for each in inputs], reduction.array(flat))


def _reduce_chunks_in_rank_order(ranks: PointToPoint, flat: Tensor, reduction: Reduction, deadline: Deadline) -> None:
    size, rank = ranks.world_size, ranks.rank
    chunks = [flat[slice(*chunk_bounds(flat.numel(), size, index))] for index in range(size)]
    own, peers = chunks[rank], [each for each in range(size) if each != rank]
    inputs = [own.clone() if each == rank else torch.empty_like(own) for each in range(size)]
    ranks.exchange(
        [(chunks[peer], peer) for peer in peers], [(inputs[peer], peer) for peer in peers], timeout=deadline.left()
    )
    reduction.reduce([reduction.array(each) for each in inputs], reduction.array(own))
    ranks.exchange([(own, peer) for peer in peers], [(chunks[peer], peer) for peer in peers], timeout=deadline.left())


def _reduce_round_the_ring(ranks: PointToPoint, flat: Tensor, reduction: Reduction, deadline: Deadline) -> None:
    """Chunk i starts at rank i and visits i + 1, i + 2, …: rank r ends with chunk r + 1 complete."""
    size, rank = ranks.world_size, ranks.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = [flat[slice(*chunk_bounds(flat.numel(), size, index))] for index in range(size)]
    buffer = torch.empty_like(chunks[0])  # chunk 0 is never the shorter one
    for step in range(size - 1):
        outgoing, own = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        incoming = buffer[: own.numel()]
        for start, stop in _stream(ranks, outgoing, right, incoming, left, deadline):
            arrived, mine = reduction.array(incoming[start:stop]), reduction.array(own[start:stop])
            reduction.combine(arrived, mine, last=step == size - 2)


def _stream(
    ranks: PointToPoint, outgoing: Tensor, right: int, incoming: Tensor, left: int, deadline: Deadline
) -> Iterable[tuple[int, int]]:
    """Exchange with both neighbours; yield the bounds of what has come, in parts where the transport can."""
    if isinstance(ranks, Streaming):
        return ranks.stream(outgoing, right, incoming, left, timeout=deadline.left())
    ranks.exchange([(outgoing, right)], [(incoming, left)], timeout=deadline.left())
    return [(0, incoming.numel())]


def _gather_round_the_ring(ranks: PointToPoint, flat: Tensor, deadline: Deadline) -> None:
    size, rank = ranks.world_size, ranks.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    chunks = [flat[slice(*chunk_bounds(flat.numel(), size, index))] for index in range(size)]
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]
        ranks.exchange([(outgoing, right)], [(incoming, left)], timeout=deadline.left())


def broadcast(ranks: PointToPoint, flat: Tensor, src: int = 0, *, timeout: float | None = None) -> None:
    """Copy rank `src`'s `flat` to every rank, along a binomial tree rooted there."""
    size, deadline = ranks.world_size, Deadline(timeout)
    place = (ranks.rank - src) % size  # this rank's number in the tree, whose root is 0
    reach = 1
    while reach < size:
        if place < reach:
            if place + reach < size:
                ranks.exchange([(flat, (place + reach + src) % size)], [], timeout=deadline.left())
        elif place < 2 * reach:
            ranks.exchange([], [(flat, (place - reach + src) % size)], timeout=deadline.left())
        reach *= 2


def barrier(ranks: PointToPoint, *, timeout: float | None = None) -> None:
    """Return once every rank has called: after step k this rank has heard of the 2^(k + 1) - 1 ranks before it."""
    size, rank, deadline = ranks.world_size, ranks.rank, Deadline(timeout)
    token = torch.zeros(1, dtype=torch.uint8)
    heard = torch.zeros(1, dtype=torch.uint8)
    reach = 1
    while reach < size:
        ranks.exchange([(token, (rank + reach) % size)], [(heard, (rank - reach) % size)], timeout=deadline.left())
        reach *= 2
