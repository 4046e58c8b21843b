"""Averages over graphs, as matrices: p[i][j] is the share of what rank j holds that goes to rank i."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from oracles.algorithms.peers import shift_one
from oracles.algorithms.simulation import Replicas, Rule

Matrix = Callable[[int, int], Tensor]
"""p, for so many ranks and the number of an exchange."""


def circulant(size: int, hops: list[int]) -> Tensor:
    """Every rank keeps a share, and sends one to each rank that is so many places ahead."""
    p = torch.eye(size, dtype=torch.float64)
    for hop in hops:
        for rank in range(size):
            p[(rank + hop) % size, rank] += 1
    return p / p.sum(0)


def powers(size: int) -> list[int]:
    return [2**k for k in range(10) if 2**k < size]


def everybody(size: int, number: int) -> Tensor:
    return circulant(size, list(range(1, size)))


def ring(size: int, number: int) -> Tensor:
    return circulant(size, sorted({1 % size, -1 % size} - {0}))


def one_peer_exponential(size: int, number: int) -> Tensor:
    return circulant(size, [powers(size)[number % len(powers(size))]] if size > 1 else [])


def exponential(size: int, number: int) -> Tensor:
    return circulant(size, powers(size))


def shifted(size: int, number: int) -> Tensor:
    p = torch.eye(size, dtype=torch.float64)
    for rank, peer in enumerate(shift_one(size, number)):
        p[peer, rank] += 1
    return p / p.sum(0)


def matched(seed: int, size: int, number: int) -> Tensor:
    """Who stands beside whom when all are shuffled."""
    order = list(range(size))
    random.Random(f"{seed} {number}").shuffle(order)
    p = torch.eye(size, dtype=torch.float64)
    for one, other in zip(order[::2], order[1::2], strict=False):
        p[one, one] = p[one, other] = p[other, one] = p[other, other] = 0.5
    return p


def lopsided(size: int, number: int) -> Tensor:
    """To the next rank, half of what a rank holds, but a quarter of what rank 0 does."""
    p = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        share = 0.25 if rank == 0 else 0.5
        p[rank, rank] += 1 - share
        p[(rank + 1) % size, rank] += share
    return p


class PushSum(Rule):
    """x <- P x and w <- P w after every step, which has moved x as it moved z = x / w."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def start(self, replicas: Replicas) -> None:
        self.z = replicas.flats()
        self.x = [flat.clone() for flat in self.z]
        self.w = torch.ones(replicas.size, dtype=torch.float64)

    def after_step(self, replicas: Replicas) -> None:
        if replicas.size == 1:
            return
        p = self.matrix(replicas.size, replicas.round)
        moved = [x + (now - z) for x, now, z in zip(self.x, replicas.flats(), self.z, strict=True)]
        dtype = moved[0].dtype
        self.x = list((p @ torch.stack(moved).double()).to(dtype))
        self.w = p @ self.w
        self.z = [x / w for x, w in zip(self.x, self.w.to(dtype), strict=True)]
        replicas.set(self.z)


class Gossip(Rule):
    """The gradient at x_t; then x <- P x_t; then the optimizer."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def before_forward(self, replicas: Replicas) -> None:
        self.before = replicas.flats()

    def before_step(self, replicas: Replicas) -> None:
        p = self.matrix(replicas.size, replicas.round)
        mixed = p @ torch.stack(self.before)
        replicas.set(new + now - old for new, now, old in zip(mixed, replicas.flats(), self.before, strict=True))
