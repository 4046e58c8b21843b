"""Aggregation for a world of one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.aggregation.base import GradientAggregator
from murmura.errors import not_built


class LocalAggregator(GradientAggregator):
    """Returns copies of this rank's own gradients; nothing is exchanged."""

    def __init__(self) -> None:
        not_built("murmura.LocalAggregator")

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        not_built("murmura.LocalAggregator.aggregate")
