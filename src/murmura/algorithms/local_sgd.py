"""Ranks train alone and average their weights now and then (local SGD, arXiv 1805.09767)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from murmura.algorithms.after_step import AfterStepImpl
from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters
from murmura.algorithms.checks import at_least_one, yes_or_no
from murmura.algorithms.names import LOCAL_STEPS, register_algorithm
from murmura.algorithms.traffic import mean_bytes
from murmura.algorithms.weights import FlatWeights
from murmura.types import ReduceOp


class LocalSGDAlgorithmImpl(AfterStepImpl):
    """The running state of `LocalSGDAlgorithm` for one model."""

    interval: int

    def use(self, weights: FlatWeights) -> None:
        self._flats = weights.allocate(self.process_group.allocate)

    def is_due(self, number: int) -> bool:
        return (number + 1) % self.interval == 0

    def communicate(self) -> None:
        self._weights.read(self._flats)
        for flat in self._flats:
            self.process_group.all_reduce(flat, ReduceOp.MEAN)
        self._weights.write(self._flats)


@register_algorithm("local_sgd", interval=LOCAL_STEPS)
@dataclass(frozen=True)
class LocalSGDAlgorithm(Algorithm):
    """Averages weights after the step of every `interval`-th round.

    `average_moments` averages what the optimizers remember, such as Adam's moments, as well.
    """

    impl: ClassVar[type[AlgorithmImpl]] = LocalSGDAlgorithmImpl

    interval: int
    average_moments: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        at_least_one(interval=self.interval)
        yes_or_no(average_moments=self.average_moments)

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        return (3 if self.average_moments else 1) * mean_bytes(parameters, num_ranks) / self.interval

    @property
    def period(self) -> int:
        return self.interval
