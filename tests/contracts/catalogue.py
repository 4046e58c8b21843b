"""Every algorithm beside its simulation, for the suites that ask something of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import nn
from torch.optim import Optimizer

from contracts.training import Run, Task
from murmura import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    MinMaxUInt8,
    PowerSGDAlgorithm,
    PushSumAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    StreamingDiLoCoAlgorithm,
)
from oracles.algorithms.gradients import AllReduce, QAdam
from oracles.algorithms.powersgd import PowerSGD
from oracles.algorithms.push_sum import PushSum, one_peer_exponential
from oracles.algorithms.simulation import Rule, there_and_back
from oracles.algorithms.streaming_diloco import StreamingDiLoCo
from oracles.algorithms.weights import AsyncModelAverage, Decentralized, DiLoCo, LocalSGD, LowPrecision

QADAM = {"lr": 0.01, "warmup": 3, "weight_decay": 0.01}


def qadam_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return QAdamOptimizer(parameters, lr=0.01, warmup_steps=3, weight_decay=0.01)


@dataclass(frozen=True)
class Entry:
    """An algorithm and how to simulate what `runs` saw of it.

    Attributes:
        lockstep: whether every rank holds the same weights after every step.
        optimizer: the only one it works with, if there is one.
    """

    name: str
    make: Callable[[], Algorithm]
    rule: Callable[[Sequence[Run]], Rule]
    lockstep: bool = False
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None

    def fit(self, task: Task) -> Task:
        """The task, with the optimizer that the algorithm needs."""
        return task if self.optimizer is None else replace(task, make_optimizer=self.optimizer)


def minmax() -> Any:
    return there_and_back(MinMaxUInt8())


def layouts(runs: Sequence[Run]) -> Callable[[int], list[list[str]]]:
    """Which gradients travelled together, by round, as the ranks saw it."""
    assert all(run.layouts == runs[0].layouts for run in runs)
    return lambda number: runs[0].layouts[number]


CATALOGUE = (
    Entry("gradient_allreduce", GradientAllReduceAlgorithm, lambda runs: AllReduce(), lockstep=True),
    Entry("decentralized", lambda: DecentralizedAlgorithm(True, "all", 2), lambda runs: Decentralized("all", 2, True)),
    Entry(
        "shift_one",
        lambda: DecentralizedAlgorithm(True, "shift_one", 1),
        lambda runs: Decentralized("shift_one", 1, True),
    ),
    Entry(
        "low_precision_decentralized",
        lambda: LowPrecisionDecentralizedAlgorithm(True, 1),
        lambda runs: LowPrecision(minmax(), 1, True),
    ),
    Entry(
        "bytegrad",
        lambda: ByteGradAlgorithm(True),
        lambda runs: AllReduce(q=minmax(), hierarchical=True, layout=layouts(runs)),
        lockstep=True,
    ),
    Entry(
        "qadam",
        lambda: QAdamAlgorithm(None, True),
        lambda runs: QAdam(minmax(), hierarchical=True, **QADAM),
        lockstep=True,
        optimizer=qadam_optimizer,
    ),
    Entry(
        "powersgd",
        lambda: PowerSGDAlgorithm(2, min_compression_rate=1.5),
        lambda runs: PowerSGD(2, 1.5),
        lockstep=True,
    ),
    Entry("async", lambda: AsyncModelAverageAlgorithm(sync_interval_rounds=2), lambda runs: AsyncModelAverage(2)),
    Entry("push_sum", PushSumAlgorithm, lambda runs: PushSum(one_peer_exponential)),
    Entry("local_sgd", lambda: LocalSGDAlgorithm(2), lambda runs: LocalSGD(2)),
    Entry("diloco", lambda: DiLoCoAlgorithm(2), lambda runs: DiLoCo(2)),
    Entry(
        "streaming_diloco",
        lambda: StreamingDiLoCoAlgorithm(3, fragments=2, overlap=1, compressor=None),
        lambda runs: StreamingDiLoCo(3, 2, 1, 0.5),
    ),
)


def every(claim: Callable[[Entry], bool] = lambda entry: True) -> Any:
    """A parameter of a test, `entry`: every algorithm of which `claim` holds."""
    return pytest.mark.parametrize("entry", [pytest.param(each, id=each.name) for each in CATALOGUE if claim(each)])
