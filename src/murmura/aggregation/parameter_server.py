"""Aggregation through rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from murmura.aggregation.base import GradientAggregator
from murmura.errors import not_built

if TYPE_CHECKING:
    from murmura.config import DistributedConfig
    from murmura.transports.base import Transport


class ParameterServer(GradientAggregator):
    """A star: the ranks talk to rank 0 only, which collects, averages and sends back.

    The caller keeps the transport and closes it.
    """

    def __init__(self, config: DistributedConfig, transport: Transport) -> None:
        not_built("murmura.ParameterServer")

    def broadcast_params(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Rank 0's parameters, as new tensors, on every rank."""
        not_built("murmura.ParameterServer.broadcast_params")

    def reduce_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The mean of the gradients, as new tensors, on every rank."""
        not_built("murmura.ParameterServer.reduce_gradients")

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The same as `reduce_gradients`."""
        not_built("murmura.ParameterServer.aggregate")
