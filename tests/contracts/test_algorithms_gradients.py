"""Algorithms after which every rank takes the same step: all-reduce, ByteGrad, QAdam; against their simulations."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from contracts.catalogue import layouts, minmax
from contracts.grids import HOSTS, SIZES, grid
from contracts.training import OPTIMIZERS, adam, assert_close, by_step, regression, spread, train_world
from ddp.models import values
from murmura import (
    DDP,
    ByteGradAlgorithm,
    Cast,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    MinMaxUInt8,
    QAdamAlgorithm,
    QAdamOptimizer,
    Transport,
    run_world,
)
from oracles.algorithms.gradients import AllReduce, QAdam
from oracles.algorithms.simulation import Feedback, Task, lossy_mean, mean, simulate, there_and_back
from worlds import SECONDS

STEPS = 5


def gradients(ddp: DDP) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}


# All-reduce


@grid("size, optimizer", SIZES, tuple(OPTIMIZERS))
def test_all_reduce(size: int, optimizer: str) -> None:
    task = regression(optimizer)
    flats = by_step(train_world(size, GradientAllReduceAlgorithm(), task, STEPS))
    assert_close(flats, simulate(AllReduce(), task, size, STEPS))
    assert all(spread(each) == 0 for each in flats)


@grid("hosts, average", HOSTS, (True, False), sample=4)
def test_all_reduce_between_hosts(hosts: Sequence[int], average: bool) -> None:
    task, size = regression("momentum"), len(hosts)
    flats = by_step(train_world(size, GradientAllReduceAlgorithm(True, average), task, STEPS, hosts))
    assert_close(flats, simulate(AllReduce(average), task, size, STEPS))
    assert all(spread(each) == 0 for each in flats)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_with_fewer_bits(size: int) -> None:
    task, cast = regression("momentum", torch.float32), Cast(torch.bfloat16)
    runs = train_world(size, GradientAllReduceAlgorithm(compressor=cast), task, STEPS)
    wanted = simulate(AllReduce(q=there_and_back(cast), layout=layouts(runs)), task, size, STEPS)
    assert_close(by_step(runs), wanted, within=0.0)


# ByteGrad


@grid("size, optimizer, bucket_size_bytes", SIZES, tuple(OPTIMIZERS), (10**6, 300, 1))
def test_bytegrad_is_the_quantised_mean_of_quantised_gradients_to_the_bit(
    size: int, optimizer: str, bucket_size_bytes: int
) -> None:
    task = regression(optimizer, torch.float32)
    runs = train_world(size, ByteGradAlgorithm(False), task, 3, bucket_size_bytes=bucket_size_bytes)
    wanted = simulate(AllReduce(q=minmax(), layout=layouts(runs)), task, size, 3)
    assert_close(by_step(runs), wanted, within=0.0)


@pytest.mark.parametrize("compressor", [MinMaxUInt8(16), MinMaxUInt8(None), Cast(torch.float16)], ids=str)
def test_bytegrad_with_another_compressor(compressor: Any) -> None:
    task = regression("sgd", torch.float32)
    runs = train_world(3, ByteGradAlgorithm(compressor=compressor), task, STEPS)
    wanted = simulate(AllReduce(q=there_and_back(compressor), layout=layouts(runs)), task, 3, STEPS)
    assert_close(by_step(runs), wanted, within=0.0)


@grid("hosts, bucket_size_bytes", HOSTS, (300, 10**6), sample=4)
def test_bytegrad_between_hosts(hosts: Sequence[int], bucket_size_bytes: int) -> None:
    task, size = regression("momentum"), len(hosts)
    runs = train_world(size, ByteGradAlgorithm(True), task, STEPS, hosts, bucket_size_bytes=bucket_size_bytes)
    rule = AllReduce(q=minmax(), hierarchical=True, layout=layouts(runs))
    assert_close(by_step(runs), simulate(rule, task, size, STEPS, hosts))
    assert all(spread(each) == 0 for each in by_step(runs))


def test_bytegrad_can_sum() -> None:
    """A sum of small whole numbers that the levels hit exactly."""
    task = regression("sgd")
    sums = train_world(4, ByteGradAlgorithm(average=False), task, 1, observe=gradients)
    means = train_world(4, ByteGradAlgorithm(average=True), task, 1, observe=gradients)
    for name, gradient in sums[0].observed[0].items():
        step_size = float(4 * means[0].observed[0][name].abs().max()) / 100
        assert float((gradient - 4 * means[0].observed[0][name]).abs().max()) <= step_size
    assert all(spread(each) == 0 for each in by_step(sums))


@pytest.mark.parametrize("hosts", [[0, 0], [0, 0, 0], [0, 0, 1]])
def test_bytegrad_with_error_feedback(hosts: Sequence[int]) -> None:
    task, size = regression("momentum"), len(hosts)
    algorithm = ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8()))
    runs = train_world(size, algorithm, task, STEPS, hosts, bucket_size_bytes=700)
    assert len(runs[0].layouts[-1]) > 1
    rule = AllReduce(q=Feedback(minmax()), hierarchical=True, layout=layouts(runs))
    assert_close(by_step(runs), simulate(rule, task, size, STEPS, hosts))


def test_what_error_feedback_lost_in_one_round_comes_in_a_later_one() -> None:
    """With a gradient that stays the same, the mean of what was applied approaches it as 1 / rounds."""
    still = replace(regression("sgd", torch.float32), shard=same_data, make_optimizer=creep)

    def error(algorithm: ByteGradAlgorithm, rounds: int) -> float:
        runs = train_world(3, algorithm, still, rounds, observe=gradients)
        exact = train_world(3, GradientAllReduceAlgorithm(), still, 1, observe=gradients)[0].observed[0]
        applied = runs[0].observed
        return max(
            float((sum(each[name] for each in applied) / rounds - gradient).abs().max())
            for name, gradient in exact.items()
        )

    without = error(ByteGradAlgorithm(), 25)
    with_feedback = error(ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8())), 25)
    assert with_feedback < without / 4


def same_data(round_: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    return regression(dtype=torch.float32).shard(0, micro, rank)


def creep(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def test_one_outlier_does_not_cost_the_others_their_resolution() -> None:
    gradients = [torch.linspace(-1, 1, 256) * (rank + 1) for rank in range(2)]
    gradients[0][7] = 1e6
    blocked = lossy_mean(gradients, there_and_back(MinMaxUInt8(32)))
    assert float((blocked - mean(gradients))[32:].abs().max()) < 0.02


# QAdam


def qadam(parameters: Iterable[nn.Parameter], warmup: int, weight_decay: float) -> Optimizer:
    return QAdamOptimizer(parameters, lr=0.01, warmup_steps=warmup, weight_decay=weight_decay)


def qadam_task(warmup: int, weight_decay: float = 0.0, dtype: torch.dtype = torch.float64) -> Task:
    made = functools.partial(qadam, warmup=warmup, weight_decay=weight_decay)
    return replace(regression(dtype=dtype), make_optimizer=made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@grid("size, weight_decay", SIZES, (0.0, 0.1), sample=3)
def test_warming_up_is_adam_to_the_bit(size: int, weight_decay: float, dtype: torch.dtype) -> None:
    reference = replace(regression(dtype=dtype), make_optimizer=functools.partial(decaying_adam, decay=weight_decay))
    runs = train_world(size, QAdamAlgorithm(), qadam_task(100, weight_decay, dtype), STEPS)
    assert_close(by_step(runs), by_step(train_world(size, GradientAllReduceAlgorithm(), reference, STEPS)), within=0.0)


def decaying_adam(parameters: Iterable[nn.Parameter], decay: float) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=decay)


def test_alone_the_optimizer_is_adam_to_the_bit_while_it_warms_up() -> None:
    models = [regression(dtype=torch.float32).make_model() for _ in range(2)]
    optimizers = [qadam(models[0].parameters(), warmup=5, weight_decay=0.0), adam(models[1].parameters())]
    for number in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            regression(dtype=torch.float32).backward(model, number, 0)
            optimizer.step()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_complex_number_is_two_real_ones_for_the_optimizer() -> None:
    pairs = nn.Parameter(values(3, 2, seed=1, dtype=torch.float64))
    numbers = nn.Parameter(torch.view_as_complex(pairs.detach().clone()))
    optimizers = [qadam([each], warmup=2, weight_decay=0.1) for each in (numbers, pairs)]
    for number in range(5):
        pairs.grad = values(3, 2, seed=2 + number, dtype=torch.float64)
        numbers.grad = torch.view_as_complex(pairs.grad)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(torch.view_as_real(numbers.detach()), pairs)


@pytest.mark.parametrize("compressor", ["uint8", "sign"])
def test_what_the_warm_up_has_not_measured_does_not_move(compressor: str) -> None:
    def run(transport: Transport) -> Tensor:
        rows = nn.Embedding(4, 2, padding_idx=0)
        rows.weight.data = torch.arange(8.0).view(4, 2)
        ddp = DDP(rows, transport, algorithm=QAdamAlgorithm(compressor=compressor))
        optimizer = QAdamOptimizer(ddp.parameters(), lr=0.01, warmup_steps=2)
        for number in range(5):  # the last row is used later, the padding never
            optimizer.zero_grad()
            ddp(torch.tensor([0, 1, 2, 3 if number > 1 else 2])).square().sum().backward()
            optimizer.step()
        ddp.close()
        return rows.weight.detach()

    for weight in run_world(run, 2, timeout=SECONDS):
        assert torch.equal(weight[[0, 3]], torch.arange(8.0).view(4, 2)[[0, 3]])
        assert float((weight[1:3] - torch.arange(2.0, 6.0).view(2, 2)).abs().min()) > 0.02


@grid("size, warmup, weight_decay", SIZES, (1, 3), (0.0, 0.1), sample=5)
def test_qadam(size: int, warmup: int, weight_decay: float) -> None:
    task = qadam_task(warmup, weight_decay)
    runs = train_world(size, QAdamAlgorithm(hierarchical=False), task, 7)
    rule = QAdam(minmax(), warmup, lr=0.01, weight_decay=weight_decay)
    assert_close(by_step(runs), simulate(rule, task, size, 7))
    assert all(spread(each) == 0 for each in by_step(runs))


@grid("hosts", HOSTS, sample=2)
def test_qadam_between_hosts(hosts: Sequence[int]) -> None:
    task, size = qadam_task(2), len(hosts)
    runs = train_world(size, QAdamAlgorithm(), task, 6, hosts)
    rule = QAdam(minmax(), 2, lr=0.01, hierarchical=True)
    assert_close(by_step(runs), simulate(rule, task, size, 6, hosts))
    assert all(spread(each) == 0 for each in by_step(runs))
