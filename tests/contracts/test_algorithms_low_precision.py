"""Eight-bit differences on a ring: against the simulation, and what neighbours know of each other to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from contracts.catalogue import minmax
from contracts.grids import EQUAL_HOSTS, INTERVALS, SIZES, UNEQUAL_HOSTS, grid
from contracts.training import OPTIMIZERS, Run, assert_close, by_step, regression, spread, train_world
from murmura import DDP, Cast, ConfigError, LowPrecisionDecentralizedAlgorithm, MinMaxUInt8
from oracles.algorithms.simulation import simulate, there_and_back
from oracles.algorithms.weights import LowPrecision

STEPS = 7


def replicas(ddp: DDP) -> tuple[Tensor, Tensor, Tensor]:
    """What this rank holds of itself and of its left and right neighbours."""
    own, left, right = ([each.clone() for each in held] for held in ddp.algorithm.replicas())
    return torch.cat(own), torch.cat(left), torch.cat(right)


@grid("size, interval, optimizer", SIZES, INTERVALS, tuple(OPTIMIZERS))
def test_low_precision(size: int, interval: int, optimizer: str) -> None:
    task = regression(optimizer)
    flats = by_step(train_world(size, LowPrecisionDecentralizedAlgorithm(False, interval), task, STEPS))
    assert_close(flats, simulate(LowPrecision(minmax(), interval), task, size, STEPS))
    assert size == 1 or spread(flats[-1]) > 1e-3


@grid("hosts, interval", EQUAL_HOSTS, INTERVALS)
def test_low_precision_between_hosts(hosts: Sequence[int], interval: int) -> None:
    task, size = regression("momentum"), len(hosts)
    flats = by_step(train_world(size, LowPrecisionDecentralizedAlgorithm(True, interval), task, STEPS, hosts))
    assert_close(flats, simulate(LowPrecision(minmax(), interval, hierarchical=True), task, size, STEPS, hosts))


@pytest.mark.parametrize("compressor", [MinMaxUInt8(16), MinMaxUInt8(None), Cast(torch.bfloat16)], ids=str)
def test_another_compressor(compressor: object) -> None:
    task = regression("sgd")
    runs = train_world(3, LowPrecisionDecentralizedAlgorithm(compressor=compressor), task, STEPS)
    assert_close(by_step(runs), simulate(LowPrecision(there_and_back(compressor)), task, 3, STEPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "interval"), [(2, 1), (3, 1), (3, 3), (5, 2), (8, 1)])
def test_neighbours_know_each_other_to_the_bit(size: int, interval: int, dtype: torch.dtype) -> None:
    task = regression("momentum", dtype)
    algorithm = LowPrecisionDecentralizedAlgorithm(False, interval)
    check_neighbours(train_world(size, algorithm, task, STEPS, observe=replicas), range(size), interval)


def test_leaders_know_each_other_to_the_bit() -> None:
    runs = train_world(6, LowPrecisionDecentralizedAlgorithm(), regression(), STEPS, [0, 0, 1, 1, 2, 2], observe=held)
    check_neighbours(runs, [0, 2, 4], 1)
    for flats in by_step(runs):
        assert all(torch.equal(flats[leader], flats[leader + 1]) for leader in (0, 2, 4))


def held(ddp: DDP) -> tuple[Tensor, Tensor, Tensor] | None:
    return replicas(ddp) if ddp.transport.rank % 2 == 0 else None


def check_neighbours(runs: Sequence[Run], ring: Sequence[int], interval: int) -> None:
    """Each of the ring's ranks is what its neighbours think it is, and after an exchange it is what it holds."""
    for number in range(STEPS):
        own, left, right = zip(*(runs[rank].observed[number] for rank in ring), strict=True)
        for place, rank in enumerate(ring):
            assert torch.equal(right[place - 1], own[place])
            assert torch.equal(left[(place + 1) % len(ring)], own[place])
            if number % interval == 0:
                assert torch.equal(own[place], runs[rank].flats[number])


@pytest.mark.parametrize("hosts", UNEQUAL_HOSTS)
def test_unequal_hosts_are_refused_with_the_reason(hosts: Sequence[int]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)hosts.*hierarchical=False"):
        train_world(len(hosts), LowPrecisionDecentralizedAlgorithm(), regression(), 1, hosts)
    train_world(len(hosts), LowPrecisionDecentralizedAlgorithm(False), regression(), 1, hosts)
