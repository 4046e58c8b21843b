"""Where training must arrive: one process that sees all the data, plain loops, slow and obvious.

A shard is the batch of one rank; `shards[r]` is that of rank r.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Shard = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Shard], Tensor]


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def train_on_whole_batches(
    model: nn.Module, optimizer: Optimizer, steps: Sequence[Sequence[Shard]], loss_of: Loss
) -> list[Tensor]:
    """The weights after each step, each on the shards of all ranks put together; shards must be equally large."""
    weights = []
    for shards in steps:
        inputs, targets = (torch.cat(parts) for parts in zip(*shards, strict=True))
        optimizer.zero_grad()
        loss_of(model, (inputs, targets)).backward()
        optimizer.step()
        weights.append(flat(model))
    return weights


def train_on_shards(
    model: nn.Module, optimizer: Optimizer, steps: Sequence[Sequence[Shard]], loss_of: Loss
) -> tuple[list[Tensor], list[list[dict[str, Tensor]]]]:
    """The weights after each step, and each rank's buffers then, by step and rank.

    Every rank begins a step with rank 0's buffers. Shards run one by one, because BatchNorm sees only its own.
    """
    weights, buffers = [], []
    names = [name for name, _ in model.named_buffers()]
    for shards in steps:
        begin = {name: model.get_buffer(name).clone() for name in names}
        ends = []
        optimizer.zero_grad()
        for shard in shards:
            restore(model, begin)
            (loss_of(model, shard) / len(shards)).backward()
            ends.append({name: model.get_buffer(name).clone() for name in names})
        optimizer.step()
        restore(model, ends[0])
        weights.append(flat(model))
        buffers.append(ends)
    return weights, buffers


def restore(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, value in buffers.items():
        model.get_buffer(name).copy_(value)


def train_on_uneven_data(
    model: nn.Module, optimizer: Optimizer, by_rank: Sequence[Sequence[Shard]], loss_of: Loss, accumulate: int = 1
) -> list[Tensor]:
    """The weights after each step on the mean over all batches that any rank has in it, `accumulate` of each rank.

    Ranks that have run out bring nothing, and do not count.
    """
    weights = []
    longest = max(map(len, by_rank))
    for start in range(0, longest, accumulate):
        batches = [batch for own in by_rank for batch in own[start : start + accumulate]]
        optimizer.zero_grad()
        for batch in batches:
            (loss_of(model, batch) / len(batches)).backward()
        optimizer.step()
        weights.append(flat(model))
    return weights


def mean_gradients(model: nn.Module, losses: Sequence[Callable[[nn.Module], Tensor]]) -> dict[str, Tensor | None]:
    """The mean over the ranks of the gradients, None where no rank has one; each rank has its own loss."""
    by_rank = []
    for loss_of in losses:
        replica = copy.deepcopy(model)
        loss_of(replica).backward()
        by_rank.append({name: parameter.grad for name, parameter in replica.named_parameters()})
    means: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        own = [gradients[name] for gradients in by_rank]
        if all(gradient is None for gradient in own):
            means[name] = None
        else:
            present = [torch.zeros_like(parameter) if gradient is None else gradient for gradient in own]
            means[name] = sum(present[1:], present[0]) / len(losses)
    return means
