"""PowerSGD as the paper writes it, one matrix at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracles.algorithms.simulation import Replicas, Rule, mean


def gram_schmidt(columns: Tensor) -> Tensor:
    """The columns made orthonormal, one after the other."""
    result: list[Tensor] = []
    for column in columns.unbind(1):
        for former in result:
            column = column - former * (former @ column)
        result.append(column / column.norm())
    return torch.stack(result, 1)


class PowerSGD(Rule):
    """M <- g + e; P = gs(mean M Q); Q = mean M^T P; g <- P Q^T; e <- M - P Q^T; the next round begins with Q.

    `first` makes the Q of a parameter, by name, width and the number of the round.
    """

    takes_buffers_of_rank_0 = True

    def __init__(
        self,
        first: Callable[[str, int, int], Tensor],
        rank: int,
        rate: float = 2.0,
        *,
        warm_start: bool = True,
        error_feedback: bool = True,
        warmup_rounds: int = 0,
    ) -> None:
        self.first, self.rank, self.rate = first, rank, rate
        self.warm_start, self.error_feedback, self.warmup_rounds = warm_start, error_feedback, warmup_rounds

    def start(self, replicas: Replicas) -> None:
        self.q: dict[str, Tensor] = {}
        self.errors: list[dict[str, Tensor]] = [{} for _ in range(replicas.size)]

    def after_backward(self, replicas: Replicas) -> None:
        everyone = [dict(model.named_parameters()) for model in replicas.models]
        for name in everyone[0]:
            parameters = [own[name] for own in everyone]
            if all(each.grad is None for each in parameters):
                continue
            gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
            result = self.product(replicas, name, gradients)
            for each in parameters:
                each.grad = result.clone()

    def product(self, replicas: Replicas, name: str, gradients: list[Tensor]) -> Tensor:
        shape = gradients[0].shape
        height, width = shape[0], gradients[0].numel() // shape[0]
        rank = min(self.rank, height, width)
        is_small = self.rate * rank * (height + width) >= height * width
        if replicas.size == 1 or is_small or replicas.round < self.warmup_rounds:
            return mean(gradients)
        matrices = [each.reshape(height, width) for each in gradients]
        if self.error_feedback:
            matrices = [m + own.get(name, torch.zeros_like(m)) for m, own in zip(matrices, self.errors, strict=True)]
        if name not in self.q or not self.warm_start:
            self.q[name] = self.first(name, width, replicas.round)[:, :rank]
        p = gram_schmidt(mean([m @ self.q[name] for m in matrices]))
        self.q[name] = mean([m.T @ p for m in matrices])
        decoded = p @ self.q[name].T
        for own, m in zip(self.errors, matrices, strict=True):
            own[name] = m - decoded
        return decoded.reshape(shape)
