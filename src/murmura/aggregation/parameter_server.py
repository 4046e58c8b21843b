"""Aggregation through rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.aggregation.base import GradientAggregator
from murmura.aggregation.checks import check_place, check_sendable
from murmura.aggregation.layout import FlatBuffers, check_same_layout, clones, from_json, layout_of, to_json, unpack
from murmura.config import DistributedConfig
from murmura.transports.base import Transport
from murmura.transports.objects import broadcast_bytes
from murmura.types import ReduceOp


class ParameterServer(GradientAggregator):
    """A star: rank 0 collects from all, averages in rank order, and its result goes to all.

    The caller keeps the transport and closes it.
    """

    def __init__(self, config: DistributedConfig, transport: Transport) -> None:
        check_place(config, transport)
        self._transport = transport
        self._buffers = FlatBuffers(transport)

    def broadcast_params(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Rank 0's parameters, as new tensors, on every rank.

        The others may pass an empty list; what they do pass must have rank 0's shapes and dtypes. On them the tensors
        are made on the current device of the kind that rank 0 keeps them on.
        """
        params = check_sendable(params, "params", mean=False)
        if self._transport.world_size == 1:
            return clones(params)
        is_server = self._transport.rank == 0
        layout = layout_of(params)
        check_same_layout(
            self._transport, "ParameterServer.broadcast_params", layout, abstains=not is_server and not params
        )
        layout = from_json(broadcast_bytes(self._transport, to_json(layout).encode()).decode())
        likes = params if is_server else [slot.empty() for slot in layout]
        flats = self._buffers.pack(likes, layout)
        for flat in flats:
            self._transport.broadcast(flat, src=0)
        return unpack(flats, likes, layout)

    def reduce_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The mean of the gradients, as new tensors, the same bits on every rank."""
        gradients = check_sendable(gradients, "gradients", mean=True)
        if self._transport.world_size == 1:
            return clones(gradients)
        layout = layout_of(gradients)
        flats = self._buffers.pack(gradients, layout)
        check_same_layout(self._transport, "ParameterServer.reduce_gradients", layout)
        for flat in flats:
            self._transport.reduce(flat, dst=0, op=ReduceOp.MEAN)
            self._transport.broadcast(flat, src=0)
        return unpack(flats, gradients, layout)

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The same as `reduce_gradients`."""
        return self.reduce_gradients(gradients)
