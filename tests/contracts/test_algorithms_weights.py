"""Algorithms that exchange weights, step by step against their simulations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from contracts.catalogue import minmax
from contracts.grids import HOSTS, INTERVALS, SIZES, grid
from contracts.training import (
    OPTIMIZERS,
    assert_close,
    by_step,
    regression,
    scatter,
    spread,
    standing_still,
    train_world,
)
from murmura import (
    AsyncModelAverageAlgorithm,
    Cast,
    Compressor,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    ErrorFeedback,
    LocalSGDAlgorithm,
    MinMaxUInt8,
)
from oracles.algorithms.peers import shift_one
from oracles.algorithms.simulation import Feedback, simulate, there_and_back
from oracles.algorithms.weights import AsyncModelAverage, Decentralized, DiLoCo, LocalSGD

MODES = ("all", "shift_one")
STEPS = 7

# Decentralised


@grid("mode, size, interval, optimizer", MODES, SIZES, INTERVALS, tuple(OPTIMIZERS))
def test_decentralized(mode: str, size: int, interval: int, optimizer: str) -> None:
    task = regression(optimizer)
    flats = by_step(train_world(size, DecentralizedAlgorithm(False, mode, interval), task, STEPS))
    assert_close(flats, simulate(Decentralized(mode, interval), task, size, STEPS))
    assert size == 1 or spread(flats[-1]) > 1e-3


@grid("mode, hosts, interval", MODES, HOSTS, INTERVALS)
def test_decentralized_between_hosts(mode: str, hosts: Sequence[int], interval: int) -> None:
    task, size = regression("momentum"), len(hosts)
    flats = by_step(train_world(size, DecentralizedAlgorithm(True, mode, interval), task, STEPS, hosts))
    assert_close(flats, simulate(Decentralized(mode, interval, hierarchical=True), task, size, STEPS, hosts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4, 5])
def test_peers_hold_the_same_bits_after_they_have_met(size: int, dtype: torch.dtype) -> None:
    runs = train_world(size, DecentralizedAlgorithm(False, "shift_one"), standing_still(dtype), STEPS, begin=scatter)
    for number, flats in enumerate(by_step(runs)):
        assert all(torch.equal(flats[rank], flats[peer]) for rank, peer in enumerate(shift_one(size, number)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 2, 2]])
def test_all_ranks_hold_the_same_bits_after_all_have_met(hosts: Sequence[int], dtype: torch.dtype) -> None:
    algorithm = DecentralizedAlgorithm(True, "all")
    for flats in by_step(train_world(len(hosts), algorithm, standing_still(dtype), 2, hosts, begin=scatter)):
        assert all(torch.equal(flat, flats[0]) for flat in flats)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1, 1], [0, 1, 2, 2, 0]])
def test_hosts_that_have_met_hold_the_mean_over_their_ranks(hosts: Sequence[int]) -> None:
    """Not the mean of the hosts' means: a host of many ranks counts for as many."""
    runs = train_world(5, DecentralizedAlgorithm(True, "shift_one"), standing_still(), 2, hosts, begin=scatter)
    (starts,) = simulate(Decentralized(), standing_still(), 5, 1, begin=scatter)
    flats = by_step(runs)
    for host in set(hosts):
        own = [flats[0][rank] for rank in range(5) if hosts[rank] == host]
        assert all(torch.equal(flat, own[0]) for flat in own)
    if len(set(hosts)) == 2:
        assert_close(flats[:1], [starts])


def test_a_full_cycle_of_four_brings_consensus() -> None:
    flats = by_step(train_world(4, DecentralizedAlgorithm(False, "shift_one"), standing_still(), 2, begin=scatter))
    assert spread(flats[0]) > 0.1
    assert spread(flats[1]) < 1e-12


# Averages after local steps


@grid("size, interval, optimizer", SIZES, INTERVALS, tuple(OPTIMIZERS))
def test_local_sgd(size: int, interval: int, optimizer: str) -> None:
    task = regression(optimizer)
    flats = by_step(train_world(size, LocalSGDAlgorithm(interval), task, STEPS))
    assert_close(flats, simulate(LocalSGD(interval), task, size, STEPS))
    for number, each in enumerate(flats):
        assert (spread(each) == 0) == (size == 1 or (number + 1) % interval == 0)


@grid("size, interval, optimizer", SIZES, INTERVALS, tuple(OPTIMIZERS))
def test_diloco(size: int, interval: int, optimizer: str) -> None:
    task = regression(optimizer)
    flats = by_step(train_world(size, DiLoCoAlgorithm(interval), task, STEPS))
    assert_close(flats, simulate(DiLoCo(interval), task, size, STEPS))
    for number, each in enumerate(flats):
        assert (spread(each) == 0) == (size == 1 or (number + 1) % interval == 0)


def test_an_outer_step_of_one_without_momentum_is_local_sgd() -> None:
    task = regression("momentum")
    one = by_step(train_world(3, DiLoCoAlgorithm(2, outer_lr=1.0, outer_momentum=0.0), task, STEPS))
    assert_close(one, by_step(train_world(3, LocalSGDAlgorithm(2), task, STEPS)))


@pytest.mark.parametrize("compressor", [Cast(torch.bfloat16), MinMaxUInt8(), MinMaxUInt8(16)], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_diloco_with_fewer_bits(size: int, compressor: Compressor) -> None:
    task, q = regression("adam"), there_and_back(compressor)
    flats = by_step(train_world(size, DiLoCoAlgorithm(2, 0.5, 0.8, compressor=compressor), task, STEPS))
    assert_close(flats, simulate(DiLoCo(2, 0.5, 0.8, q=q), task, size, STEPS))
    assert all(spread(each) == 0 for each in flats[1::2])


def test_diloco_with_error_feedback() -> None:
    task = regression("adam")
    algorithm = DiLoCoAlgorithm(2, compressor=ErrorFeedback(MinMaxUInt8()))
    flats = by_step(train_world(3, algorithm, task, STEPS))
    assert_close(flats, simulate(DiLoCo(2, q=Feedback(minmax())), task, 3, STEPS))


# Averages with delay


@grid("size, interval, optimizer", SIZES, INTERVALS, tuple(OPTIMIZERS))
def test_async_counting_rounds(size: int, interval: int, optimizer: str) -> None:
    task = regression(optimizer)
    flats = by_step(train_world(size, AsyncModelAverageAlgorithm(sync_interval_rounds=interval), task, STEPS))
    assert_close(flats, simulate(AsyncModelAverage(interval), task, size, STEPS))


def test_counting_rounds_gives_the_same_bits_every_time() -> None:
    algorithm, task = AsyncModelAverageAlgorithm(sync_interval_rounds=1), regression("adam", torch.float32)
    runs: list[list[list[Tensor]]] = [by_step(train_world(3, algorithm, task, STEPS)) for _ in range(3)]
    assert_close(runs[0], runs[1], within=0.0)
    assert_close(runs[0], runs[2], within=0.0)
