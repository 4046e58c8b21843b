"""Aggregation through rank 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from murmura.aggregation.agreement import agree, control_device
from murmura.aggregation.base import GradientAggregator
from murmura.aggregation.checks import check_place, check_sendable
from murmura.aggregation.layout import (
    FlatBuffers,
    Slot,
    clones,
    from_bytes,
    from_json,
    layout_of,
    to_bytes,
    to_json,
    unpack,
)
from murmura.config import DistributedConfig
from murmura.transports.base import Transport
from murmura.types import ReduceOp


class ParameterServer(GradientAggregator):
    """A star: rank 0 collects from all, averages in rank order, and its result goes to all.

    The caller keeps the transport and closes it.
    """

    def __init__(self, config: DistributedConfig, transport: Transport) -> None:
        check_place(config, transport)
        self._config = config
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
        device = control_device(self._config, params)
        layout = layout_of(params)
        is_silent = not is_server and not params
        agree(self._transport, "ParameterServer.broadcast_params", layout, device, is_silent=is_silent)
        layout = self._broadcast_layout(layout, device)
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
        agree(self._transport, "ParameterServer.reduce_gradients", layout, control_device(self._config, gradients))
        for flat in flats:
            self._transport.reduce(flat, dst=0, op=ReduceOp.MEAN)
            self._transport.broadcast(flat, src=0)
        return unpack(flats, gradients, layout)

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The same as `reduce_gradients`."""
        return self.reduce_gradients(gradients)

    def _broadcast_layout(self, layout: list[Slot], device: torch.device) -> list[Slot]:
        """Rank 0's layout, as JSON: its length first, then its bytes."""
        data = to_bytes(to_json(layout), device)
        length = torch.tensor([data.numel()], device=device)
        self._transport.broadcast(length, src=0)
        if self._transport.rank != 0:
            data = torch.empty(int(length), dtype=torch.uint8, device=device)
        self._transport.broadcast(data, src=0)
        return from_json(from_bytes(data))
