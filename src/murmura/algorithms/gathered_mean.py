"""The mean of compressed values by a gather: every rank decodes the payloads of all and adds them up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from murmura.algorithms.compressed import CompressedMean
from murmura.collectives.reduction import divide
from murmura.compressors import Compressor
from murmura.transports.base import Transport


class GatheredMean(CompressedMean):
    """Each rank encodes all of its values and sends them to everyone: mean Q(x), formed in rank order.

    Payloads of one length go into memory that is reused; lengths that differ are told first.
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
        super().__init__(transport, like, compressor, [like.numel()], shares=shares, average=average)
        self._payloads: Tensor | None = None
        if not compressor.is_uneven:
            num_bytes = compressor.payload_bytes(like.numel(), like.dtype)
            self._payloads = transport.allocate(size * num_bytes, torch.uint8, like.device).view(size, num_bytes)

    def __call__(self, flat: Tensor) -> None:
        self._check(flat)
        (encoder,) = self._encoders
        payloads = self._gather(encoder, flat)
        in_place = flat.dtype == self._wide
        total = flat.zero_() if in_place else torch.zeros_like(flat, dtype=self._wide)
        for payload, share in zip(payloads, self._shares, strict=True):
            if share == 1:
                encoder.decompress_add(payload, total)
            else:
                decoded = torch.empty_like(total)
                encoder.decompress(payload, decoded)
                total.add_(decoded, alpha=share)
        divide(total, self._divisor)
        if not in_place:
            flat.copy_(total)

    def _gather(self, encoder: Compressor, flat: Tensor) -> Sequence[Tensor]:
        transport = self._transport
        if self._payloads is None:
            return transport.all_gather(encoder.encode(flat))
        own = self._payloads[transport.rank]
        encoder.compress(flat, own)
        transport.all_gather_into(self._payloads.view(-1), own)
        return list(self._payloads)
