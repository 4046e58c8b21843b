"""Every algorithm beside its simulation, for the suites that ask something of all of them."""

from __future__ import annotations

import zlib
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
    Compressor,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    MinMaxUInt4,
    MinMaxUInt8,
    PowerSGDAlgorithm,
    PushSumAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    RandomK,
    Sign,
    StreamingDiLoCoAlgorithm,
    TopK,
    TopKTwoBit,
)
from oracles.algorithms.few_bytes import FeedbackByStream, GatheredQAdam
from oracles.algorithms.gradients import AllReduce, GatheredAllReduce, QAdam
from oracles.algorithms.powersgd import PowerSGD
from oracles.algorithms.push_sum import Gossip, PushSum, exponential, lopsided, one_peer_exponential
from oracles.algorithms.simulation import Feedback, Rule, there_and_back
from oracles.algorithms.streaming_diloco import StreamingDiLoCo
from oracles.algorithms.weights import (
    AsyncModelAverage,
    Decentralized,
    DiLoCo,
    LocalSGD,
    LowPrecision,
    SparseLoCo,
    WithMoments,
)
from sequences.algorithms import lopsided as lopsided_topology

QADAM = {"lr": 0.01, "warmup": 3, "weight_decay": 0.01}


def qadam_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return QAdamOptimizer(parameters, lr=0.01, warmup_steps=3, weight_decay=0.01)


@dataclass(frozen=True)
class Entry:
    """An algorithm and how to simulate what `runs` saw of it.

    Attributes:
        lockstep: whether every rank holds the same weights after every step.
        optimizer: the only one it works with, if there is one.
        is_rough: whether a rounding error may change what is sent by as much as it is.
        is_exact: whether the simulation does the same operations in the same order, where ranks are threads, and so
            agrees to the bit. QAdam's does not: its step is written as the paper has it. Nor do graphs' and PowerSGD's,
            which are products of matrices.
    """

    name: str
    make: Callable[[], Algorithm]
    rule: Callable[[Sequence[Run]], Rule]
    lockstep: bool = False
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    is_rough: bool = False
    is_exact: bool = False

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
        is_exact=True,
    ),
)

INNER: dict[str, Callable[[], Compressor]] = {
    "uint4": lambda: MinMaxUInt4(16),
    "sign": lambda: Sign(16),
    "topk": lambda: TopK(0.1),
    "randomk": lambda: RandomK(0.2),
}


def rule_of(name: str, runs: Sequence[Run], *, hierarchical: bool = True, feedback: bool = True) -> Rule:
    """Gradients by the compressor `name` of `INNER`."""
    layout = layouts(runs)
    if INNER[name]().gathers:
        return GatheredAllReduce(there_and_back(INNER[name]()), hierarchical, layout, feedback)
    q = FeedbackByStream(INNER[name], feedback)

    def and_new_draws(number: int) -> list[list[str]]:
        if number > 0 and layout(number) != layout(number - 1):
            q.of_stream.clear()  # buckets that are planned anew draw anew, also one that has come out as it was
        return layout(number)

    return AllReduce(q=q, hierarchical=hierarchical, layout=and_new_draws)


def compressed(name: str, *, feedback: bool = True) -> Entry:
    """Gradients by the compressor `name` of `INNER`, in two levels."""
    inner = ErrorFeedback(INNER[name]()) if feedback else INNER[name]()
    return Entry(
        name,
        lambda: GradientAllReduceAlgorithm(True, compressor=inner),
        lambda runs: rule_of(name, runs, feedback=feedback),
        lockstep=True,
        is_rough=True,
        is_exact=True,
    )


FEW_BYTES = (
    *map(compressed, INNER),
    Entry(
        "majority_vote",
        lambda: GradientAllReduceAlgorithm(compressor="majority_vote"),
        lambda runs: AllReduce(q=there_and_back(Sign(scaled=False)), layout=layouts(runs)),
        lockstep=True,
        is_rough=True,
        is_exact=True,
    ),
    Entry(
        "qadam_sign",
        lambda: QAdamAlgorithm(None, True, compressor=ErrorFeedback(Sign(16))),
        lambda runs: QAdam(FeedbackByStream(INNER["sign"]), hierarchical=True, **QADAM),
        lockstep=True,
        optimizer=qadam_optimizer,
        is_rough=True,
    ),
    Entry(
        "qadam_topk",
        lambda: QAdamAlgorithm(None, True, compressor=ErrorFeedback(TopK(0.1))),
        lambda runs: GatheredQAdam(there_and_back(TopK(0.1)), hierarchical=True, **QADAM),
        lockstep=True,
        optimizer=qadam_optimizer,
        is_rough=True,
    ),
    Entry(
        "sparse_loco",
        lambda: DiLoCoAlgorithm(2, 1.0, 0.0, compressor=ErrorFeedback(TopKTwoBit(16, 4), decay=0.95)),
        lambda runs: SparseLoCo(2, 0.95, there_and_back(TopKTwoBit(16, 4))),
        is_rough=True,
        is_exact=True,
    ),
    Entry(
        "streaming_uint4",
        lambda: StreamingDiLoCoAlgorithm(3, fragments=2, overlap=1),
        lambda runs: StreamingDiLoCo(3, 2, 1, 0.5, q=lambda: Feedback(there_and_back(MinMaxUInt4()))),
        is_rough=True,
        is_exact=True,
    ),
    Entry(
        "average_moments",
        lambda: LocalSGDAlgorithm(2, average_moments=True),
        lambda runs: WithMoments(LocalSGD(2)),
        is_exact=True,
    ),
    Entry(
        "exponential",
        lambda: DecentralizedAlgorithm(False, topology="exponential"),
        lambda runs: Gossip(exponential),
    ),
    Entry("lopsided", lambda: PushSumAlgorithm(lopsided_topology), lambda runs: PushSum(lopsided)),
)
EVERYTHING = (*CATALOGUE, *FEW_BYTES)
FAMILY = ("powersgd", "push_sum", "streaming_diloco", *(entry.name for entry in FEW_BYTES))
"""The names of those that send few bytes, or over directed graphs."""


def every(claim: Callable[[Entry], bool] = lambda entry: True, *, in_pairs: bool = False) -> Any:
    """A parameter of a test, `entry`: every algorithm of which `claim` holds.

    Those of few bytes are slow but for one or two, other ones in each test; and all of `FAMILY` where what is tested
    is among the circumstances of `lives`, whose pairs have it.
    """

    def mark(test: Callable[..., None]) -> Any:
        shift = zlib.crc32(test.__name__.encode())
        quick = [*CATALOGUE, *(each for place, each in enumerate(FEW_BYTES) if (place + shift) % 6 == 0)]
        if in_pairs:
            quick = [each for each in CATALOGUE if each.name not in FAMILY]
        chosen = [each for each in EVERYTHING if claim(each)]
        marks = [[] if each in quick else [pytest.mark.slow] for each in chosen]
        cases = [pytest.param(each, id=each.name, marks=own) for each, own in zip(chosen, marks, strict=True)]
        return pytest.mark.parametrize("entry", cases)(test)

    return mark
