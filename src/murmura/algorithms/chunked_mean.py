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
from murmura.collectives.reduction import divide
from murmura.compressors import Compressor
from murmura.transports.base import Transport

PIECE_ELEMENTS = 2**18
"""Of each rank's chunk, what is encoded, averaged or decoded while other pieces travel."""


class _Piece(NamedTuple):
    """A piece of every rank's chunk: where it is in the flat, and its payloads."""

    bounds: list[tuple[int, int]]
    payload: Tensor  # whose parts are `parts`
    parts: list[Tensor]
    arrived: Tensor  # a row from each rank, which are `from_all`
    from_all: list[Tensor]
    mean: Tensor | None  # of this rank's own part; None if that is formed where the part is in the flat


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
        # One kernel then takes the codes of all chunks; encoders that keep residuals are one for each.
        is_plain = self._mean_encoder is compressor and all(share == 1 for share in self._shares)
        self._at_once = like.is_cuda and len(self._pieces) == 1 and is_plain

    def __call__(self, flat: Tensor) -> None:
        """Overwrite `flat` with the mean."""
        self._check(flat)
        transport, pieces = self._transport, self._pieces
        start = partial(self._codec.start, num_pieces=len(pieces))
        encoded = [start(partial(self._encode, flat, piece)) for piece in pieces]
        reduced, decoded = [], []
        for piece, future in zip(pieces, encoded, strict=True):
            future.result()
            transport.all_to_all(piece.parts, piece.from_all)
            reduced.append(start(partial(self._reduce, flat, piece)))
        for piece, future in zip(pieces, reduced, strict=True):
            future.result()
            self._spread(piece)
            decoded.append(start(partial(self._decode, flat, piece)))
        for future in decoded:
            future.result()

    def _encode(self, flat: Tensor, piece: _Piece) -> None:
        """Fill the parts; this rank's own, of which the flat has no more need, becomes what all would decode."""
        if self._at_once:
            self._mean_encoder.compress_parts(flat, len(piece.parts), piece.payload)
            return
        for rank, (encoder, part) in enumerate(zip(self._encoders, piece.parts, strict=True)):
            values = flat[slice(*piece.bounds[rank])]
            if rank == self._transport.rank and self._decodes_own:
                encoder.compress_decoding(values, part, values)
            else:
                encoder.compress(values, part)

    def _reduce(self, flat: Tensor, piece: _Piece) -> None:
        """Overwrite this rank's own part with the mean, encoded."""
        own, decoder = self._transport.rank, self._mean_encoder
        values, payload = flat[slice(*piece.bounds[own])], piece.parts[own]
        mean = values if piece.mean is None else piece.mean
        if self._at_once:
            decoder.compress_mean(piece.arrived, self._divisor, mean, payload)
            return
        ranks = list(range(len(self._shares)))
        if piece.mean is None:  # one of the first two, for x + y is y + x
            ranks.insert(0, ranks.pop(own))
        for place, rank in enumerate(ranks):
            part, share = piece.from_all[rank], self._shares[rank]
            if rank == own and self._decodes_own:
                decoded = values
            elif place == 0:
                decoder.decompress(part, decoded := mean)
            elif share == 1:
                decoder.decompress_add(part, mean)
                continue
            else:
                decoder.decompress(part, decoded := torch.empty_like(mean))
            if share != 1:
                decoded.mul_(share)
            if decoded is not mean:
                mean.add_(decoded)
        divide(mean, self._divisor)
        if self._decodes_own:
            decoder.compress_decoding(mean, payload, values)
        else:
            decoder.compress(mean, payload)

    def _spread(self, piece: _Piece) -> None:
        """Send this rank's own part to all, and fill the others from theirs."""
        transport, parts = self._transport, piece.parts
        own = parts[transport.rank]
        # NCCL gathers equal parts by a ring, faster than by messages between all.
        if transport.gpu is not None and len({len(each) for each in parts}) == 1:
            transport.all_gather_into(piece.payload, own)
        else:
            transport.all_to_all([own] * transport.world_size, parts)

    def _decode(self, flat: Tensor, piece: _Piece) -> None:
        if self._at_once:
            self._mean_encoder.decompress_parts(piece.payload, len(piece.parts), flat)
            return
        for rank, (bounds, part) in enumerate(zip(piece.bounds, piece.parts, strict=True)):
            if rank != self._transport.rank or not self._decodes_own:
                self._mean_encoder.decompress(part, flat[slice(*bounds)])

    @property
    def _decodes_own(self) -> bool:
        """Whether this rank's own part is decoded when it is encoded: means are formed in the dtype of the flat."""
        return self._wide == self._like.dtype


def _cut(transport: Transport, like: Tensor, compressor: Compressor) -> list[_Piece]:
    """The pieces of `like`, with memory for their payloads and, where needed, for the mean of this rank's chunk."""
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
        parts, rows = list(torch.split(payload, num_bytes)), arrived.view(size, num_bytes[rank])
        mean = None
        if rank > 1 or wide(like.dtype) != like.dtype:
            mean = torch.empty(bounds[rank][1] - bounds[rank][0], dtype=wide(like.dtype), device=like.device)
        pieces.append(_Piece(bounds, payload, parts, rows, list(rows), mean))
    return pieces
