"""One exchange of a topology on a flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

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
        for segment in segments_of(flat):
            received = self.memory(segment, len(neighbours.receives_from))
            self._transport.exchange(
                [(segment, peer) for peer in neighbours.sends_to],
                list(zip(received, neighbours.receives_from, strict=True)),
            )
            segment.mul_(own)
            for theirs, weight in zip(received, weights, strict=True):
                segment.add_(theirs, alpha=weight)

    def memory(self, like: Tensor, count: int) -> list[Tensor]:
        """Where `count` tensors like `like` are received; the next call may return the same."""
        kind = (like.dtype, like.device)
        numel = count * like.numel()
        if kind not in self._incoming or self._incoming[kind].numel() < numel:
            self._incoming[kind] = self._transport.allocate(numel, like.dtype, like.device)
        return list(torch.split(self._incoming[kind][:numel], like.numel())) if count else []


def segments_of(flat: Tensor) -> Sequence[Tensor]:
    """`flat` in segments of `SEGMENT_BYTES`; the last one may be shorter."""
    return torch.split(flat, max(1, min(flat.numel(), SEGMENT_BYTES // flat.element_size())))
