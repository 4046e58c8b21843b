"""One exchange of a topology on a flat tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from murmura.algorithms.topology import Neighbours
from murmura.transports.base import Transport

SEGMENT_BYTES = 64 * 2**20
"""What peers' values are received and added in, so that no second copy of a large model is needed for each.

Nothing travels between two segments, so they are long.
"""


class Mixer:
    """Mixes flats of this rank with those of its peers on `transport`; keeps memory for what it receives."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._incoming: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def mix(self, flat: Tensor, neighbours: Neighbours) -> None:
        """Overwrite `flat` with the weighted sum over `neighbours`."""
        own, *weights = neighbours.weights
        length = max(1, min(flat.numel(), SEGMENT_BYTES // flat.element_size()))
        for segment in torch.split(flat, length):
            received = self._memory(segment, len(neighbours.receives_from))
            self._transport.exchange(
                [(segment, peer) for peer in neighbours.sends_to],
                list(zip(received, neighbours.receives_from, strict=True)),
            )
            segment.mul_(own)
            for theirs, weight in zip(received, weights, strict=True):
                segment.add_(theirs, alpha=weight)

    def _memory(self, like: Tensor, count: int) -> list[Tensor]:
        kind = (like.dtype, like.device)
        numel = count * like.numel()
        if kind not in self._incoming or self._incoming[kind].numel() < numel:
            self._incoming[kind] = self._transport.allocate(numel, like.dtype, like.device)
        return list(torch.split(self._incoming[kind][:numel], like.numel())) if count else []
