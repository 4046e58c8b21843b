"""Any gradient aggregator as an algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from murmura.aggregation import GradientAggregator
from murmura.algorithms.base import Algorithm, AlgorithmImpl
from murmura.algorithms.checks import instances_of
from murmura.buckets import Bucket
from murmura.types import Exchanges


class AggregateGradientsImpl(AlgorithmImpl):
    """The running state of `AggregateGradients` for one model."""

    exchanges = Exchanges.GRADIENTS

    aggregator: GradientAggregator

    def on_bucket_ready(self, bucket: Bucket) -> None:
        (mean,) = self.aggregator.aggregate([bucket.flat])
        bucket.flat.copy_(mean)


@dataclass(frozen=True)
class AggregateGradients(Algorithm):
    """Hands each bucket to `aggregator`, which must return the mean over the ranks; so a parameter server trains too.

    The aggregator keeps the transport it was made with, and one model has it for itself.
    """

    impl: ClassVar[type[AlgorithmImpl]] = AggregateGradientsImpl

    aggregator: GradientAggregator

    def __post_init__(self) -> None:
        instances_of(GradientAggregator, aggregator=self.aggregator)
