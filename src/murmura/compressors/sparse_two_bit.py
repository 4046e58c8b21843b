"""The largest elements of each chunk, two bits each (SparseLoCo, arXiv 2508.15706)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from murmura.compressors.base import Compressor, check_call, check_encodable, working_dtype
from murmura.compressors.minmax_plain import sections
from murmura.compressors.names import register_compressor
from murmura.errors import ConfigError

PLACE_BYTES = 2
LONGEST_CHUNK = 2**15


@register_compressor("topk2bit", feedback=True)
@dataclass(frozen=True)
class TopKTwoBit(Compressor):
    """Sends the `count` elements of each chunk that are largest in magnitude: place, sign, and one of two magnitudes.

    The elements sent are split at their mean magnitude into large and small ones; each is decoded as the mean magnitude
    of its half, with its sign. Zeros stay zero. A chunk that holds an infinity or a NaN decodes to such values, too.
    Payloads are gathered, as those of `TopK` are.
    """

    chunk_size: int = 4096
    count: int = 64

    def __post_init__(self) -> None:
        for name, most in (("chunk_size", LONGEST_CHUNK), ("count", self.chunk_size)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ConfigError(f"{name}={value!r} must be a whole number from 1 to {most}.")

    @property
    def gathers(self) -> bool:
        return True

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        check_encodable(dtype)
        total = self._total(numel)
        return PLACE_BYTES * total + -(-total // 4) + 2 * working_dtype(dtype).itemsize * -(-numel // self.chunk_size)

    def _total(self, numel: int) -> int:
        """How many elements are sent."""
        whole, rest = divmod(numel, self.chunk_size)
        return whole * self.count + min(rest, self.count)

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        check_call(self, tensor, payload)
        places, codes, magnitudes = [], [], []
        for rows in sections(tensor.detach(), self.chunk_size):
            found = torch.topk(rows.abs(), min(self.count, rows.shape[1]), sorted=False).indices
            values = rows.gather(1, found).to(working_dtype(tensor.dtype))
            sizes = values.abs()
            counts = sizes != 0
            is_high = sizes >= _mean(sizes, counts).view(-1, 1)
            magnitudes.append(
                torch.stack([_mean(sizes, counts & ~is_high), _mean(sizes, counts & is_high)], 1).view(-1)
            )
            # No code stands for zero: where a chunk has too few other elements, its largest is sent again.
            largest = sizes.argmax(1, keepdim=True)
            found, values, is_high = (
                torch.where(counts, each, each.gather(1, largest)) for each in (found, values, is_high)
            )
            codes.append(((values >= 0).to(torch.uint8) | is_high.to(torch.uint8) << 1).view(-1))
            places.append(found.to(torch.int16).view(-1))
        if places:
            flat_codes = torch.cat(codes)
            padded = torch.nn.functional.pad(flat_codes, (0, -flat_codes.numel() % 4)).view(-1, 4)
            packed = (padded << _places(padded)).sum(1, dtype=torch.uint8)
            parts = [torch.cat(places).view(torch.uint8), packed, torch.cat(magnitudes).view(torch.uint8)]
            payload.copy_(torch.cat(parts))

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        check_call(self, out, payload)
        total = self._total(out.numel())
        bounds = [PLACE_BYTES * total, PLACE_BYTES * total + -(-total // 4)]
        raw_places, packed, raw_magnitudes = payload.clone().tensor_split(bounds)
        places = raw_places.view(torch.int16).to(torch.int64)
        codes = ((packed.view(-1, 1) >> _places(packed)) & 3).view(-1)[:total]
        magnitudes = raw_magnitudes.clone().view(working_dtype(out.dtype)).view(-1, 2)
        out.detach().zero_()
        for rows in sections(out.detach(), self.chunk_size):
            height, count = rows.shape[0], min(self.count, rows.shape[1])
            here, places = places[: height * count].view(height, count), places[height * count :]
            code, codes = codes[: height * count].view(height, count), codes[height * count :]
            (low, high), magnitudes = magnitudes[:height].tensor_split(2, 1), magnitudes[height:]
            values = torch.where(code > 1, high, low) * ((code & 1).to(low.dtype) * 2 - 1)
            rows.scatter_(1, here, values.to(out.dtype))


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of the `chosen` in each row, 0 if there are none."""
    return (values * chosen).sum(1) / chosen.sum(1).clamp(min=1)


def _places(like: Tensor) -> Tensor:
    """How far to shift the codes of a byte."""
    return torch.arange(0, 8, 2, dtype=torch.uint8, device=like.device)
