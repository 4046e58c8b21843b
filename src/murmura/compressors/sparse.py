"""A few of the elements: the largest ones with their places, or some that are drawn at random on all ranks alike."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from murmura.compressors.base import Compressor, check_call, check_encodable, working_dtype
from murmura.compressors.names import register_compressor
from murmura.errors import ConfigError

PLACE_BYTES, NUMBER_BYTES = 4, 8


@register_compressor("topk", feedback=True)
@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the share `ratio` of the elements that are largest in magnitude, with their places; the others are zero.

    Ranks choose different elements, so payloads are gathered: each rank sends n - 1 of them, and the mean may have n
    times as many elements that are not zero. It needs error feedback to converge, which the name `topk` includes.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)

    @property
    def gathers(self) -> bool:
        return True

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        check_encodable(dtype)
        return _count(self.ratio, numel) * (PLACE_BYTES + working_dtype(dtype).itemsize)

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        check_call(self, tensor, payload)
        values = tensor.detach()
        places = torch.topk(values.abs(), _count(self.ratio, values.numel()), sorted=False).indices
        chosen = values[places].to(working_dtype(values.dtype))
        begin = PLACE_BYTES * places.numel()
        payload[:begin].copy_(places.to(torch.int32).view(torch.uint8))
        payload[begin:].copy_(chosen.view(torch.uint8))

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        out.detach().zero_()
        self.decompress_add(payload, out)

    def decompress_add(self, payload: Tensor, out: Tensor) -> None:
        check_call(self, out, payload)
        begin = PLACE_BYTES * _count(self.ratio, out.numel())
        places = payload[:begin].clone().view(torch.int32).to(torch.int64)
        chosen = payload[begin:].clone().view(working_dtype(out.dtype))
        out.detach().index_add_(0, places, chosen.to(out.dtype))


@register_compressor("randomk", feedback=True)
@dataclass(unsafe_hash=True)
class RandomK(Compressor):
    """Sends the share `ratio` of the elements, drawn anew for each tensor, one out of every 1 / ratio; others are zero.

    The draw follows from `seed` and a number that travels along, so no places are sent; all ranks draw the same, so a
    mean loses nothing when it is encoded again. It needs error feedback, which the name `randomk` includes. The number
    of the next draw is state, one per bucket.
    """

    ratio: float = 0.01
    seed: int = 0
    _number: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed={self.seed!r} is no whole number from 0 to 2**31 - 1.")

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        check_encodable(dtype)
        return NUMBER_BYTES + _count(self.ratio, numel) * working_dtype(dtype).itemsize

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        check_call(self, tensor, payload)
        values = tensor.detach()
        number = torch.tensor([self._number], dtype=torch.int64)
        chosen = values[self._places(self._number, values)].to(working_dtype(values.dtype))
        payload[:NUMBER_BYTES].copy_(number.view(torch.uint8))
        payload[NUMBER_BYTES:].copy_(chosen.view(torch.uint8))
        self._number += 1

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        out.detach().zero_()
        self.decompress_add(payload, out)

    def decompress_add(self, payload: Tensor, out: Tensor) -> None:
        check_call(self, out, payload)
        number = int(payload[:NUMBER_BYTES].clone().view(torch.int64))
        chosen = payload[NUMBER_BYTES:].clone().view(working_dtype(out.dtype))
        out.detach().index_add_(0, self._places(number, out), chosen.to(out.dtype))

    def _places(self, number: int, like: Tensor) -> Tensor:
        """One place in each of as many strata of equal length, give or take one: in whole numbers, on every device."""
        numel, count = like.numel(), _count(self.ratio, like.numel())
        bounds = torch.arange(count + 1) * numel // max(1, count)
        random = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {number}".encode()))  # it has 32 bits
        drawn = torch.randint(2**62, (count,), generator=random)
        return (bounds[:-1] + drawn % (bounds[1:] - bounds[:-1])).to(like.device)

    def for_bucket(self) -> Self:
        return type(self)(self.ratio, self.seed)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._number = state["number"]


def _check_ratio(ratio: object) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError(f"ratio={ratio!r} must be a number above 0 and at most 1: the share of elements to send.")


def _count(ratio: float, numel: int) -> int:
    """How many of `numel` elements are sent: at least one, if there are any."""
    return min(numel, max(1, math.ceil(ratio * numel)))
