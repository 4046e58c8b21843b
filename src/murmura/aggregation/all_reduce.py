"""Aggregation by all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.aggregation.flat_mean import FlatMean
from murmura.types import ReduceOp


class AllReduceAggregator(FlatMean):
    """The mean over all ranks by all-reduce; the caller keeps the transport and closes it."""

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The mean of the gradients, as new tensors, the same bits on every rank."""
        return self.average(gradients, "AllReduceAggregator.aggregate")

    def average_flat(self, flat: Tensor) -> None:
        self._transport.all_reduce(flat, ReduceOp.MEAN)
