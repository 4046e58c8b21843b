"""The mean of compressed values: Q(mean Q(x)), the same bits on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from murmura.algorithms.codec_thread import CodecThread, cut
from murmura.collectives.chunks import chunk_bounds
from murmura.compressors import Compressor
from murmura.errors import ConfigError
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


class Residual(NamedTuple):
    """What compression left over of one parameter: on this rank, and in the means, on all ranks alike."""

    own: Tensor
    mean: Tensor


class CompressedMean:
    """Means over `transport` of flat tensors like `like`, one after another.

    Each rank encodes chunk r for rank r, which decodes what comes from all, averages in rank order (the half types in
    fp32), encodes the mean and sends it to everyone. A rank's own part is encoded too, so all decode the same bytes.
    `shares[r]` is the weight of rank r. Long chunks go in pieces, which changes no bit.
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
        self._transport = transport
        self._codec = codec
        self._shares = [1] * size if shares is None else list(shares)
        self._divisor = sum(self._shares) if average else 1
        self._pieces = _cut(transport, like, compressor)
        bounds = [chunk_bounds(like.numel(), size, rank) for rank in range(size)]
        zero = torch.zeros(1, dtype=like.dtype, device=like.device)
        self._chunks = [zero.expand(stop - start) for start, stop in bounds]  # zeros of the length of each rank's chunk
        # What an encoder remembers belongs to one stream of values, so every stream has its own.
        self._encoders = [compressor.for_bucket() for _ in range(size)]
        self._mean_encoder = compressor.for_bucket()

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

    def residuals(self, names: Sequence[str], numels: Sequence[int]) -> dict[str, Residual]:
        """What compression left over, by parameter. Collective: each rank holds that of its chunk's mean."""
        own = [_or_zeros(encoder.residual, like) for encoder, like in zip(self._encoders, self._chunks, strict=True)]
        chunk = _or_zeros(self._mean_encoder.residual, self._pieces[0].mean)
        means = self._transport.all_gather(chunk)
        parts = zip(torch.split(torch.cat(own), list(numels)), torch.split(torch.cat(means), list(numels)), strict=True)
        return {name: Residual(*part) for name, part in zip(names, parts, strict=True)}

    def set_residuals(self, names: Sequence[str], numels: Sequence[int], residuals: Mapping[str, Residual]) -> None:
        """Take over what `residuals` returned, perhaps of other tensors; a parameter that is not there has none."""
        own = torch.cat(self._chunks)
        mean = torch.zeros_like(own, dtype=self._pieces[0].mean.dtype)
        parts = zip(names, torch.split(own, list(numels)), torch.split(mean, list(numels)), strict=True)
        for name, own_part, mean_part in parts:
            if name in residuals:
                own_part.copy_(residuals[name].own)
                mean_part.copy_(residuals[name].mean)
        lengths = [chunk.numel() for chunk in self._chunks]
        for encoder, chunk in zip(self._encoders, torch.split(own, lengths), strict=True):
            encoder.set_residual(chunk)
        self._mean_encoder.set_residual(torch.split(mean, lengths)[self._transport.rank])

    def state_dict(self) -> dict[str, Any]:
        return {
            "encoders": [encoder.state_dict() for encoder in self._encoders],
            "mean_encoder": self._mean_encoder.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not any(state["encoders"]) and not state["mean_encoder"]:
            return  # nothing is left over
        if len(state["encoders"]) != len(self._encoders):
            raise ConfigError(
                f"this state was saved by {len(state['encoders'])} ranks that exchange, and here are "
                f"{len(self._encoders)}: what compression left over belongs to chunks that are cut otherwise. "
                "Go on with as many ranks, or leave the algorithm's state out."
            )
        for encoder, each in zip(self._encoders, state["encoders"], strict=True):
            encoder.load_state_dict(each)
        self._mean_encoder.load_state_dict(state["mean_encoder"])


def _or_zeros(residual: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if residual is None else residual.to(like.device)


def _cut(transport: Transport, like: Tensor, compressor: Compressor) -> list[_Piece]:
    """The pieces of `like`, with memory for their payloads and for the mean of this rank's chunk."""
    size, rank = transport.world_size, transport.rank
    chunks = [chunk_bounds(like.numel(), size, each) for each in range(size)]
    shortest = min(stop - start for start, stop in chunks)  # the others have one element more, in their last piece
    starts = [low for low, _ in cut(shortest, PIECE_ELEMENTS, compressor, like.device)]
    wide = like.dtype if like.dtype.itemsize > 2 else torch.float32
    pieces = []
    for low, high in itertools.zip_longest(starts, starts[1:]):
        bounds = [(start + low, stop if high is None else start + high) for start, stop in chunks]
        num_bytes = [compressor.payload_bytes(stop - start, like.dtype) for start, stop in bounds]
        payload = transport.allocate(sum(num_bytes), torch.uint8, like.device)
        arrived = transport.allocate(num_bytes[rank] * size, torch.uint8, like.device)
        parts, from_all = list(torch.split(payload, num_bytes)), list(torch.split(arrived, [num_bytes[rank]] * size))
        mean = torch.empty(bounds[rank][1] - bounds[rank][0], dtype=wide, device=like.device)
        pieces.append(_Piece(bounds, payload, parts, from_all, mean))
    return pieces
