"""Parameters that no rank uses in a round: what messages lost of them waits until somebody uses them again."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from contracts.catalogue import INNER, rule_of
from contracts.grids import grid
from contracts.training import assert_close, by_step, momentum, spread, train_world
from ddp.models import fill, values
from murmura import (
    DDP,
    Algorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    TopK,
    Transport,
    run_world,
)
from oracles.algorithms.few_bytes import FeedbackByStream
from oracles.algorithms.gradients import QAdam
from oracles.algorithms.powersgd import PowerSGD
from oracles.algorithms.simulation import Task, simulate
from worlds import SECONDS

USERS = ("all", "nobody", "nobody", "last", "nobody", "all", "nobody", "all")
"""Who uses the second head, by round."""
STEPS = len(USERS)

Example = tuple[Tensor, bool]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(5, 16), nn.Linear(16, 8), nn.Linear(16, 12)

    def forward(self, inputs: Tensor, second: bool) -> Tensor:
        hidden = self.body(inputs).tanh()
        loss: Tensor = (self.first(hidden) ** 2).mean()
        return loss + ((self.second(hidden) - 1) ** 2).mean() if second else loss


def model(dtype: torch.dtype) -> nn.Module:
    return fill(TwoHeads()).to(dtype)


def example(size: int, dtype: torch.dtype, number: int, micro: int, rank: int) -> Example:
    uses = USERS[number] == "all" or (USERS[number] == "last" and rank == size - 1)
    return values(4, 5, seed=100 * number + rank, dtype=dtype), uses


def loss(model: nn.Module, data: Example) -> Tensor:
    result: Tensor = model(*data)
    return result


def task(size: int, dtype: torch.dtype, optimizer: functools.partial[QAdamOptimizer] | None = None) -> Task:
    shard = functools.partial(example, size, dtype)
    return Task(functools.partial(model, dtype), optimizer or momentum, shard, loss)


@grid("name, size, bucket_size_bytes", tuple(INNER), (1, 2, 3), (10**6, 300), sample=4)
def test_what_compressors_lost_of_them_waits(name: str, size: int, bucket_size_bytes: int) -> None:
    chosen = task(size, torch.float32)
    algorithm = GradientAllReduceAlgorithm(compressor=ErrorFeedback(INNER[name]()))
    runs = train_world(size, algorithm, chosen, STEPS, bucket_size_bytes=bucket_size_bytes)
    assert_close(by_step(runs), simulate(rule_of(name, runs, hierarchical=False), chosen, size, STEPS), within=0.0)


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 1]])
@pytest.mark.parametrize("name", ["topk", "uint4"])
def test_and_between_hosts(name: str, hosts: Sequence[int]) -> None:
    chosen = task(3, torch.float64)
    algorithm = GradientAllReduceAlgorithm(True, compressor=ErrorFeedback(INNER[name]()))
    runs = train_world(3, algorithm, chosen, STEPS, hosts)
    assert_close(by_step(runs), simulate(rule_of(name, runs), chosen, 3, STEPS, hosts))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_factors_lost_of_them_waits(size: int) -> None:
    chosen = task(size, torch.float64)
    runs = train_world(size, PowerSGDAlgorithm(2, min_compression_rate=1.5), chosen, STEPS, bucket_size_bytes=300)
    assert_close(by_step(runs), simulate(PowerSGD(2, 1.5), chosen, size, STEPS))
    assert all(spread(each) == 0 for each in by_step(runs))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ["sign", "uint4", "randomk"])
def test_what_moments_lost_of_them_waits(name: str, size: int) -> None:
    chosen = task(size, torch.float64, functools.partial(QAdamOptimizer, lr=1e-3, warmup_steps=1))
    runs = train_world(size, QAdamAlgorithm(compressor=ErrorFeedback(INNER[name]())), chosen, STEPS)
    assert_close(by_step(runs), simulate(QAdam(FeedbackByStream(INNER[name]), 1, lr=1e-3), chosen, size, STEPS))


def collect(transport: Transport, algorithm: Algorithm) -> tuple[list[float], bool]:
    """All that a head gets: of a gradient in round 0, of no use by anybody, and of uses without any gradient."""
    layers = nn.ModuleDict({"body": nn.Linear(1, 1), "head": nn.Linear(4, 1, bias=False)})
    ddp = DDP(layers, transport, algorithm=algorithm)
    head, owed = ddp.module["head"].weight, torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    got, stays_none = torch.zeros(1, 4), True
    for number in range(12):
        optimizer.zero_grad()
        loss = 0 * ddp.module["body"](torch.ones(1)).sum()
        if number == 0 or number > 3:
            loss = loss + (head * owed).sum() * (number == 0)
        loss.backward()
        optimizer.step()
        stays_none &= (head.grad is None) == (1 <= number <= 3)
        got += 0 if head.grad is None else head.grad
    ddp.close()
    return got.view(-1).tolist(), stays_none


@pytest.mark.parametrize("size", [1, 2, 3])
def test_in_the_end_it_gets_what_it_is_owed(size: int) -> None:
    algorithm = GradientAllReduceAlgorithm(compressor=ErrorFeedback(TopK(0.25)))
    rank = functools.partial(collect, algorithm=algorithm)
    assert run_world(rank, size, timeout=SECONDS) == [([1.0, 2.0, 3.0, 4.0], True)] * size
