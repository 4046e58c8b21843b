"""Aggregation for a world of one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.aggregation.base import GradientAggregator
from murmura.aggregation.checks import check_list
from murmura.aggregation.layout import clones


class LocalAggregator(GradientAggregator):
    """Returns copies of this rank's own gradients; nothing is exchanged, so any tensor will do."""

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return clones(check_list(gradients, "gradients"))
