"""Aggregation through rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.aggregation.checks import check_sendable
from murmura.aggregation.flat_mean import FlatMean
from murmura.aggregation.layout import check_same_layout, clones, from_json, layout_of, to_json, unpack
from murmura.transports.objects import broadcast_bytes
from murmura.types import ReduceOp


class ParameterServer(FlatMean):
    """A star: rank 0 collects from all, averages in rank order, and its result goes to all.

    The caller keeps the transport and closes it.
    """

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
        return self.average(gradients, "ParameterServer.reduce_gradients")

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The same as `reduce_gradients`."""
        return self.reduce_gradients(gradients)

    def average_flat(self, flat: Tensor) -> None:
        self._transport.reduce(flat, dst=0, op=ReduceOp.MEAN)
        self._transport.broadcast(flat, src=0)
