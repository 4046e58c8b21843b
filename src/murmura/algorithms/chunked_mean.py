"""The mean of compressed values by chunks: Q(mean Q(x))."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from murmura.algorithms.codec_thread import CodecThread, cut
from murmura.algorithms.compressed import CompressedMean, wide
from murmura.collectives.chunks import chunk_bounds
from murmura.compressors import Compressor
from murmura.transports.base import Transport

PIECE_ELEMENTS = 2**18
"""Of each rank's chunk, what is encoded, averaged or decoded while other pieces travel."""


class _Piece(NamedTuple):
    """A piece of every rank's chunk: where it is in the flat, its payloads, and the mean of this rank's own."""

    bounds: list[tuple[int, int]]
    payload: Tensor  # whose parts are `parts`
    parts: list[Tensor]
    from_all: list[Tensor]
    mean: Tensor


class ChunkedMean(CompressedMean):
    """Each rank encodes chunk r for rank r, which decodes what comes from all and sends the mean to everyone, encoded.

    Means are formed in rank order (of the half types in fp32). A rank's own part is encoded too, so all decode the same
    bytes. Long chunks go in pieces, which changes no bit.
    """

    def __init__(
        self,
        transport: Transport,
        like: Tensor,
        compressor: Compressor,
        codec: CodecThread,
        *,
        shares: Sequence[int] | None = None,
        average: bool = True,
    ) -> None:
        size = transport.world_size
        bounds = [chunk_bounds(like.numel(), size, rank) for rank in range(size)]
        lengths = [stop - start for start, stop in bounds]
        super().__init__(
            transport, like, compressor, lengths, slice(*bounds[transport.rank]), shares=shares, average=average
        )
        self._codec = codec
        self._pieces = _cut(transport, like, compressor)

    def __call__(self, flat: Tensor) -> None:
        """Overwrite `flat` with the mean."""
        transport, pieces = self._transport, self._pieces
        start = partial(self._codec.start, num_pieces=len(pieces))
        encoded = [start(partial(self._encode, flat, piece)) for piece in pieces]
        reduced, decoded = [], []
        for piece, future in zip(pieces, encoded, strict=True):
            future.result()
            transport.all_to_all(piece.parts, piece.from_all)
            reduced.append(start(partial(self._reduce, piece)))
        for piece, future in zip(pieces, reduced, strict=True):
            future.result()
            self._spread(piece)
            decoded.append(start(partial(self._decode, flat, piece)))
        for future in decoded:
            future.result()

    def _encode(self, flat: Tensor, piece: _Piece) -> None:
        for encoder, (start, stop), part in zip(self._encoders, piece.bounds, piece.parts, strict=True):
            encoder.compress(flat[start:stop], part)

    def _reduce(self, piece: _Piece) -> None:
        """Overwrite this rank's own part with the mean, encoded."""
        mean, decoder = piece.mean, self._mean_encoder
        for rank, (part, share) in enumerate(zip(piece.from_all, self._shares, strict=True)):
            if rank == 0:
                decoder.decompress(part, mean)
                if share != 1:
                    mean.mul_(share)
            elif share == 1:
                decoder.decompress_add(part, mean)
            else:
                decoded = torch.empty_like(mean)
                decoder.decompress(part, decoded)
                mean.add_(decoded.mul_(share))
        mean.div_(self._divisor)
        decoder.compress(mean, piece.parts[self._transport.rank])

    def _spread(self, piece: _Piece) -> None:
        """Send this rank's own part to all, and fill the others from theirs."""
        transport, parts = self._transport, piece.parts
        own = parts[transport.rank]
        # NCCL gathers equal parts by a ring, faster than by messages between all.
        if transport.device is not None and transport.device.type == "cuda" and len({len(each) for each in parts}) == 1:
            transport.all_gather_into(piece.payload, own)
        else:
            transport.all_to_all([own] * transport.world_size, parts)

    def _decode(self, flat: Tensor, piece: _Piece) -> None:
        for (start, stop), part in zip(piece.bounds, piece.parts, strict=True):
            self._mean_encoder.decompress(part, flat[start:stop])


def _cut(transport: Transport, like: Tensor, compressor: Compressor) -> list[_Piece]:
    """The pieces of `like`, with memory for their payloads and for the mean of this rank's chunk."""
    size, rank = transport.world_size, transport.rank
    chunks = [chunk_bounds(like.numel(), size, each) for each in range(size)]
    shortest = min(stop - start for start, stop in chunks)  # the others have one element more, in their last piece
    starts = [low for low, _ in cut(shortest, PIECE_ELEMENTS, compressor, like.device)]
    pieces = []
    for low, high in itertools.zip_longest(starts, starts[1:]):
        bounds = [(start + low, stop if high is None else start + high) for start, stop in chunks]
        num_bytes = [compressor.payload_bytes(stop - start, like.dtype) for start, stop in bounds]
        payload = transport.allocate(sum(num_bytes), torch.uint8, like.device)
        arrived = transport.allocate(num_bytes[rank] * size, torch.uint8, like.device)
        parts, from_all = list(torch.split(payload, num_bytes)), list(torch.split(arrived, [num_bytes[rank]] * size))
        mean = torch.empty(bounds[rank][1] - bounds[rank][0], dtype=wide(like.dtype), device=like.device)
        pieces.append(_Piece(bounds, payload, parts, from_all, mean))
    return pieces
