"""Replicas that may differ: how far apart they are, and their mean for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from murmura.buckets.flat import FlatTensors, plain_memory
from murmura.ddp.replica import ModelReplica


@torch.no_grad()
def consensus_distance(replica: ModelReplica, weight: float) -> float:
    """The root mean square, over the ranks, of the Euclidean distance of a rank's parameters to their mean.

    `weight` is that of this rank in the mean.
    """
    own = [p.to(torch.complex128 if p.is_complex() else torch.float64) for p in replica.parameters]
    means = _means(replica, own, weight)
    squares = sum(float((each - mean).abs().square().sum()) for each, mean in zip(own, means, strict=True))
    total = torch.tensor([squares], dtype=torch.float64)
    replica.transport.all_reduce(total, "mean")
    return float(total.sqrt())


@contextlib.contextmanager
def average_parameters(replica: ModelReplica, weight: float) -> Iterator[None]:
    """Hold the mean of all replicas inside the block; afterwards each rank has its own parameters and buffers back."""
    tensors = [parameter.detach() for parameter in replica.parameters] + [buffer.detach() for buffer in replica.buffers]
    own = [tensor.clone() for tensor in tensors]
    means = _means(replica, tensors, weight)
    _write(tensors, means)
    try:
        yield
    finally:
        _write(tensors, own)


def _means(replica: ModelReplica, tensors: list[Tensor], weight: float) -> list[Tensor]:
    """The mean over the ranks of each of `tensors`, as new tensors; those that have no mean are copied."""
    packing = FlatTensors(tensors)
    flats = packing.allocate(plain_memory)
    for flat in flats:
        if flat.is_floating_point() or flat.is_complex():
            if weight != 1:
                flat.mul_(weight)
            replica.transport.all_reduce(flat, "mean")
    return packing.parts(flats)


@torch.no_grad()
def _write(tensors: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data.copy_(value)  # the values come back, so a graph that needs them stays valid
