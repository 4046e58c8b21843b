"""Aggregation by all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.aggregation.base import GradientAggregator
from murmura.aggregation.checks import check_place, check_sendable
from murmura.aggregation.layout import FlatBuffers, check_same_layout, clones, layout_of, unpack
from murmura.config import DistributedConfig
from murmura.transports.base import Transport
from murmura.types import ReduceOp


class AllReduceAggregator(GradientAggregator):
    """The mean over all ranks by all-reduce; the caller keeps the transport and closes it."""

    def __init__(self, config: DistributedConfig, transport: Transport) -> None:
        check_place(config, transport)
        self._transport = transport
        self._buffers = FlatBuffers(transport)

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The mean of the gradients, as new tensors, the same bits on every rank."""
        gradients = check_sendable(gradients, "gradients", mean=True)
        if self._transport.world_size == 1:
            return clones(gradients)
        layout = layout_of(gradients)
        flats = self._buffers.pack(gradients, layout)
        check_same_layout(self._transport, "AllReduceAggregator.aggregate", layout)
        for flat in flats:
            self._transport.all_reduce(flat, ReduceOp.MEAN)
        return unpack(flats, gradients, layout)
