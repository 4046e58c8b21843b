"""What an aggregator must return, and where training with one must arrive: plain loops, slow and obvious.

`by_rank[r]` is the list of tensors that rank r passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from oracles import reduce as oracle


def mean_in_rank_order(by_rank: Sequence[Sequence[Tensor]], *, ring: bool = False) -> list[Tensor]:
    """A parameter server's: each tensor summed from rank 0 to the last and divided."""
    return [oracle.fold(each, "mean") if len(each) > 1 else each[0].clone() for each in zip(*by_rank, strict=True)]


def mean_by_all_reduce(by_rank: Sequence[Sequence[Tensor]], *, ring: bool = False) -> list[Tensor]:
    """An all-reduce's: the tensors of a dtype, end to end, as one buffer; `ring` if it is made hop by hop."""
    means = [tensor.clone() for tensor in by_rank[0]]
    for dtype in {tensor.dtype for tensor in means}:
        alike = [index for index, tensor in enumerate(means) if tensor.dtype == dtype]
        buffers = [torch.cat([tensors[index].reshape(-1) for index in alike]) for tensors in by_rank]
        flat = oracle.all_reduce(buffers, "mean", ring=ring)
        start = 0
        for index in alike:
            stop = start + means[index].numel()
            means[index] = flat[start:stop].reshape(means[index].shape)
            start = stop
    return means


def mean_loss(losses: Sequence[float], counts: Sequence[int]) -> float:
    """The mean over every single sample."""
    samples = [loss for loss, count in zip(losses, counts, strict=True) for _ in range(count)]
    return sum(samples) / len(samples)


def train_alone(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], lr: float) -> list[Tensor]:
    """The weights after one step of plain gradient descent on each batch, in one process."""
    weights = list(model.parameters())
    for inputs, targets in batches:
        loss = ((model(inputs) - targets) ** 2).mean()
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= lr * gradient
    return [weight.detach().clone() for weight in weights]
