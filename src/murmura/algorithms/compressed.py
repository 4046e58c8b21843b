"""The mean of compressed values: Q(mean Q(x)), the same bits on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from murmura.collectives.chunks import chunk_bounds
from murmura.compressors import Compressor
from murmura.errors import ConfigError
from murmura.transports.base import Transport


class CompressedMean:
    """Means over `transport` of flat tensors like `like`, one after another.

    Each rank encodes chunk r for rank r, which decodes what comes from all, averages in rank order (the half types in
    fp32), encodes the mean and sends it to everyone. A rank's own part is encoded too, so all decode the same bytes.
    `shares[r]` is the weight of rank r.
    """

    def __init__(
        self,
        transport: Transport,
        like: Tensor,
        compressor: Compressor,
        *,
        shares: Sequence[int] | None = None,
        average: bool = True,
    ) -> None:
        size = transport.world_size
        self._transport = transport
        self._shares = [1] * size if shares is None else list(shares)
        self._divisor = sum(self._shares) if average else 1
        self._bounds = [chunk_bounds(like.numel(), size, rank) for rank in range(size)]
        lengths = [stop - start for start, stop in self._bounds]
        num_bytes = [compressor.payload_bytes(length, like.dtype) for length in lengths]
        self._parts = _allocate(transport, num_bytes, like.device)  # a chunk for each rank
        self._from_all = _allocate(transport, [num_bytes[transport.rank]] * size, like.device)  # of this rank's chunk
        wide = like.dtype if like.dtype.itemsize > 2 else torch.float32
        self._mean = torch.empty(lengths[transport.rank], dtype=wide, device=like.device)
        self._decoded = torch.empty_like(self._mean) if any(share != 1 for share in self._shares) else None
        # What an encoder remembers belongs to one stream of values, so every stream has its own.
        self._encoders = [compressor.for_bucket() for _ in lengths]
        self._mean_encoder = compressor.for_bucket()

    def __call__(self, flat: Tensor) -> None:
        """Overwrite `flat` with the mean."""
        transport, chunks = self._transport, [flat[start:stop] for start, stop in self._bounds]
        for encoder, chunk, part in zip(self._encoders, chunks, self._parts, strict=True):
            encoder.compress(chunk, part)
        transport.all_to_all(self._parts, self._from_all)
        self._reduce()
        own = self._parts[transport.rank]
        self._mean_encoder.compress(self._mean, own)
        transport.all_to_all([own] * transport.world_size, self._parts)
        for chunk, part in zip(chunks, self._parts, strict=True):
            self._mean_encoder.decompress(part, chunk)

    def _reduce(self) -> None:
        mean, decoder = self._mean, self._mean_encoder
        for rank, (part, share) in enumerate(zip(self._from_all, self._shares, strict=True)):
            if rank == 0:
                decoder.decompress(part, mean)
                mean.mul_(share)
            elif share == 1:
                decoder.decompress_add(part, mean)
            else:
                assert self._decoded is not None
                decoder.decompress(part, self._decoded)
                mean.add_(self._decoded.mul_(share))
        mean.div_(self._divisor)

    def state_dict(self) -> dict[str, Any]:
        return {
            "encoders": [encoder.state_dict() for encoder in self._encoders],
            "mean_encoder": self._mean_encoder.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["encoders"]) != len(self._encoders):
            raise ConfigError(
                f"this state was saved by {len(state['encoders'])} ranks that exchange, and here are "
                f"{len(self._encoders)}: what compression left over belongs to chunks that are cut otherwise. "
                "Go on with as many ranks, or leave the algorithm's state out."
            )
        for encoder, each in zip(self._encoders, state["encoders"], strict=True):
            encoder.load_state_dict(each)
        self._mean_encoder.load_state_dict(state["mean_encoder"])


def _allocate(transport: Transport, num_bytes: Sequence[int], device: torch.device) -> list[Tensor]:
    return list(torch.split(transport.allocate(sum(num_bytes), torch.uint8, device), list(num_bytes)))
