"""Aggregation without a centre."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from murmura.aggregation.base import GradientAggregator
from murmura.errors import not_built

if TYPE_CHECKING:
    from murmura.config import DistributedConfig
    from murmura.transports.base import Transport


class AllReduceAggregator(GradientAggregator):
    """The mean over all ranks by all-reduce; the caller keeps the transport and closes it."""

    def __init__(self, config: DistributedConfig, transport: Transport) -> None:
        not_built("murmura.AllReduceAggregator")

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        not_built("murmura.AllReduceAggregator.aggregate")
