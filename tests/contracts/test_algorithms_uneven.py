"""Uneven data and error feedback: gradients are weighted by data, and what messages lost counts once all the same."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from contracts.catalogue import INNER, rule_of
from contracts.grids import grid
from contracts.training import Run, assert_close, by_step, momentum, regression, step
from murmura import (
    DDP,
    Algorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    PowerSGDAlgorithm,
    TopK,
    Transport,
    run_world,
)
from oracles.algorithms.powersgd import PowerSGD
from oracles.algorithms.simulation import Task, flat_of, simulate
from worlds import SECONDS

LENGTHS = (6, 3, 5, 2)
"""How many batches each rank has."""
STEPS = max(LENGTHS)


@dataclass(frozen=True)
class Uneven(Task):
    """Ranks without data bring zeros, and the gradients of the others count for as much more."""

    size: int = 1

    def backward(
        self,
        model: nn.Module,
        round_: int,
        rank: int,
        no_sync: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        super().backward(model, min(round_, LENGTHS[rank] - 1), rank)
        share = sum(round_ < length for length in LENGTHS[: self.size]) / self.size
        for each in model.parameters():
            assert each.grad is not None
            each.grad.div_(share) if round_ < LENGTHS[rank] else each.grad.zero_()


def join(transport: Transport, algorithm: Algorithm, task: Task) -> Run:
    ddp = DDP(task.make_model(), transport, algorithm=algorithm)
    optimizer, run = task.make_optimizer(ddp.parameters()), Run()
    for number in ddp.join(range(LENGTHS[transport.rank])):
        run.layouts.append([list(bucket.names) for bucket in ddp._replica.buckets])
        step(ddp, optimizer, task, number, transport.rank)
        run.flats.append(flat_of(ddp.module))
    ddp.close()
    return run


def joined(size: int, algorithm: Algorithm, task: Task) -> list[Run]:
    return run_world(functools.partial(join, algorithm=algorithm, task=task), size, timeout=SECONDS)


def uneven(task: Task, size: int) -> Uneven:
    return Uneven(task.make_model, task.make_optimizer, task.shard, size=size)


@grid("name, size", tuple(INNER), (2, 3, 4), sample=2)
def test_a_join_with_feedback_is_as_simulated(name: str, size: int) -> None:
    task = regression("momentum", torch.float32)
    runs = joined(size, GradientAllReduceAlgorithm(compressor=ErrorFeedback(INNER[name]())), task)
    rule = rule_of(name, runs, hierarchical=False)
    assert_close(by_step(runs), simulate(rule, uneven(task, size), size, STEPS), within=0.0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_join_with_factors_is_as_simulated(size: int) -> None:
    task = regression("momentum")
    runs = joined(size, PowerSGDAlgorithm(2, min_compression_rate=1.5), task)
    assert_close(by_step(runs), simulate(PowerSGD(2, 1.5), uneven(task, size), size, STEPS))


def owed(transport: Transport, with_loader: bool) -> list[float]:
    """What a weight gets in rounds in which rank 1 has no data: all ranks owe it [3, 4] from before."""
    ddp = DDP(
        nn.Linear(2, 1, bias=False),
        transport,
        algorithm=GradientAllReduceAlgorithm(compressor=ErrorFeedback(TopK(0.5))),
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    batches = [torch.tensor([3.0, 4.0]), torch.zeros(2), torch.zeros(2)][: None if transport.rank == 0 else 1]
    found = []

    def train(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        ddp(batch).sum().backward()
        optimizer.step()
        found.append(ddp.module.weight.grad.view(-1).tolist())

    if with_loader:
        for batch in ddp.join(batches):
            train(batch)
    else:
        with ddp.join(divide_by_initial_world_size=False):
            for batch in batches:
                train(batch)
    ddp.close()
    return found


@pytest.mark.parametrize("with_loader", [True, False], ids=["loader", "context"])
def test_what_was_lost_counts_once(with_loader: bool) -> None:
    first, *_ = run_world(functools.partial(owed, with_loader=with_loader), 2, timeout=SECONDS)
    assert first == [[0.0, 4.0], [3.0, 0.0], [0.0, 0.0]]


def half(transport: Transport) -> list[float]:
    """A gradient of 8 on the rank that has data, beside what both owe."""
    algorithm = GradientAllReduceAlgorithm(compressor=ErrorFeedback(TopK(0.5)))
    ddp = DDP(nn.Linear(2, 1, bias=False), transport, algorithm=algorithm)
    optimizer = momentum(ddp.parameters())
    batches = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 8.0])][: None if transport.rank == 0 else 1]
    for batch in ddp.join(batches):
        optimizer.zero_grad()
        ddp(batch).sum().backward()
        optimizer.step()
    found: list[float] = ddp.module.weight.grad.view(-1).tolist()
    ddp.close()
    return found


def test_gradients_count_for_as_much_more_as_data_are_missing() -> None:
    # Rank 0 sends 2 * 8 and keeps its 3; rank 1, which has nothing new, sends its 3.
    assert run_world(half, 2, timeout=SECONDS) == [[1.5, 8.0]] * 2


def owes_after_a_join(transport: Transport) -> list[float]:
    """How far a weight has moved when all that messages lost has been sent: rank 1 leaves its loop after one batch."""
    model = nn.Linear(4, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    ddp = DDP(model, transport, algorithm=GradientAllReduceAlgorithm(compressor=ErrorFeedback(TopK(0.25))))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    inputs = torch.tensor([[4.0, 3.0, 2.0, 1.0]], dtype=torch.float64)

    def take_step(factor: float) -> None:
        optimizer.zero_grad()
        ddp(factor * inputs).sum().backward()
        optimizer.step()

    with ddp.join():
        for _ in range(1 if transport.rank else 4):
            take_step(1.0)
    optimizer.zero_grad()
    for _ in range(7):
        take_step(0.0)
    ddp.close()
    return model.weight[0].tolist()


def test_what_a_rank_sent_after_its_last_batch_is_not_sent_again() -> None:
    assert run_world(owes_after_a_join, 2, timeout=SECONDS) == [[-10.0, -7.5, -5.0, -2.5]] * 2
