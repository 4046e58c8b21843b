"""PowerSGD as the paper writes it, one matrix at a time."""

from __future__ import annotations

import zlib

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


def drawn(name: str, width: int, rank: int, number: int) -> Tensor:
    """The Q that murmura begins with, of seed 0: alike on all ranks, whatever the buckets are."""
    random = torch.Generator().manual_seed(zlib.crc32(f"0 {number} {name}".encode()))
    return torch.randn(width, rank, generator=random, dtype=torch.float64)


class PowerSGD(Rule):
    """M <- g + e; P = gs(mean M Q); Q = mean M^T P; g <- P Q^T; e <- M - P Q^T; the next round begins with Q."""

    takes_buffers_of_rank_0 = True

    def __init__(
        self,
        rank: int,
        rate: float = 2.0,
        *,
        warm_start: bool = True,
        error_feedback: bool = True,
        warmup_rounds: int = 0,
    ) -> None:
        self.rank, self.rate = rank, rate
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
            number = 0 if self.warm_start else replicas.round
            self.q[name] = drawn(name, width, rank, number).to(matrices[0].dtype)
        p = gram_schmidt(mean([m @ self.q[name] for m in matrices]))
        q = mean([m.T @ p for m in matrices])
        decoded = p @ q.T
        if not replicas.skipping:  # otherwise the step is skipped on all ranks, and nothing has happened
            self.q[name] = q
            for own, m in zip(self.errors, matrices, strict=True):
                own[name] = m - decoded
        return decoded.reshape(shape)
