"""Any gradient aggregator as an algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from murmura.algorithms.base import Algorithm
from murmura.errors import not_built

if TYPE_CHECKING:
    from murmura.aggregation import GradientAggregator


@dataclass(frozen=True)
class AggregateGradients(Algorithm):
    """Hands the gradients of each bucket to `aggregator` and applies what it returns."""

    aggregator: GradientAggregator

    def __post_init__(self) -> None:
        not_built("murmura.AggregateGradients")
