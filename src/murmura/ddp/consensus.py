"""Replicas that may differ: how far apart they are, and their mean for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from murmura.ddp.flattening import average_together
from murmura.ddp.replica import ModelReplica


@torch.no_grad()
def consensus_distance(replica: ModelReplica) -> float:
    """The root mean square, over the ranks, of the Euclidean distance of a rank's parameters to their mean."""
    own = [p.to(torch.complex128 if p.is_complex() else torch.float64) for p in replica.parameters]
    means = average_together(replica.transport, own)
    squares = sum(float((each - mean).abs().square().sum()) for each, mean in zip(own, means, strict=True))
    total = torch.tensor([squares], dtype=torch.float64)
    replica.transport.all_reduce(total, "mean")
    return float(total.sqrt())


@contextlib.contextmanager
def average_parameters(replica: ModelReplica) -> Iterator[None]:
    """Hold the mean of all replicas inside the block; afterwards each rank has its own parameters and buffers back."""
    tensors = [parameter.detach() for parameter in replica.parameters] + [buffer.detach() for buffer in replica.buffers]
    own = [tensor.clone() for tensor in tensors]
    means = average_together(replica.transport, tensors)
    _write(tensors, means)
    try:
        yield
    finally:
        _write(tensors, own)


@torch.no_grad()
def _write(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data.copy_(value)  # the values come back, so a graph that needs them stays valid
