"""Algorithms after which every rank takes the same step: all-reduce, ByteGrad, QAdam; against their simulations."""

from __future__ import annotations

import pytest
import torch

from contracts.training import OPTIMIZERS, assert_close, by_step, regression, spread, train_world
from murmura import GradientAllReduceAlgorithm
from oracles.algorithms.gradients import AllReduce
from oracles.algorithms.simulation import simulate

STEPS = 5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce(size: int, optimizer: str) -> None:
    task = regression(optimizer)
    flats = by_step(train_world(size, GradientAllReduceAlgorithm(), task, STEPS))
    assert_close(flats, simulate(AllReduce(), task, size, STEPS))
    assert all(spread(each) == 0 for each in flats)
