"""A few of the elements: the largest ones with their places, or some that are drawn at random on all ranks alike."""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from murmura.compressors.base import Compressor, check_call, check_encodable, working_dtype
from murmura.compressors.names import register_compressor
from murmura.errors import ConfigError

BLOCK = 2**16  # elements, a place in which takes two bytes
PLACE_BYTES, END_BYTES, NUMBER_BYTES = 2, 4, 8
SAMPLE = 2**14


class _Sparse(Compressor):
    """Payloads that hold a few of the elements; the others decode to zero."""

    @abstractmethod
    def _parts(self, payload: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """The places of the elements that `payload` holds, each once, and their values in the dtype of `out`."""

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        out.detach().zero_()
        self.decompress_add(payload, out)

    def decompress_add(self, payload: Tensor, out: Tensor) -> None:
        places, chosen = self._parts(payload, out)
        out.detach().index_add_(0, places, chosen)

    def decompress_subtract(self, payload: Tensor, out: Tensor) -> None:
        places, chosen = self._parts(payload, out)
        out.detach().index_add_(0, places, chosen, alpha=-1)


@register_compressor("topk", feedback=True)
@dataclass(frozen=True)
class TopK(_Sparse):
    """Sends the share `ratio` of the elements that are largest in magnitude, with their places; the others are zero.

    A payload holds for each block of 2**16 elements but the last how many of those sent come before its end, then the
    places inside the blocks in ascending order, then the values: six bytes for an element of float32.
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
        per_element = PLACE_BYTES + working_dtype(dtype).itemsize
        return END_BYTES * (_num_blocks(numel) - 1) + per_element * _count(self.ratio, numel)

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        check_call(self, tensor, payload)
        values = tensor.detach()
        dtype = working_dtype(values.dtype)
        places = largest(values.abs().to(dtype), _count(self.ratio, values.numel()))
        bounds = BLOCK * torch.arange(1, _num_blocks(values.numel()), device=values.device)
        ends = torch.searchsorted(places, bounds).to(torch.int32)
        inside = (places % BLOCK - BLOCK // 2).to(torch.int16)
        payload.copy_(torch.cat([each.view(torch.uint8) for each in (ends, inside, values[places].to(dtype))]))

    def _parts(self, payload: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        check_call(self, out, payload)
        count = _count(self.ratio, out.numel())
        begin = END_BYTES * (_num_blocks(out.numel()) - 1)
        ends, inside, chosen = payload.clone().tensor_split([begin, begin + PLACE_BYTES * count])
        numbers = torch.arange(count, dtype=torch.int32, device=payload.device)
        blocks = torch.bucketize(numbers, ends.view(torch.int32), right=True)
        places = blocks * BLOCK + inside.clone().view(torch.int16) + BLOCK // 2
        return places, chosen.clone().view(working_dtype(out.dtype)).to(out.dtype)


def largest(magnitudes: Tensor, count: int) -> Tensor:
    """The places of the `count` largest of `magnitudes`, float32 or float64, in ascending order; NaN is the largest.

    On a CPU, where selecting from all of them is slow, only those are looked at that are not below one of the larger
    elements of a sample; these are enough but for the oddest samples.
    """
    num_sampled = SAMPLE * count / max(1, magnitudes.numel())
    rank = math.ceil(num_sampled + 4 * math.sqrt(num_sampled))
    if magnitudes.is_cpu and magnitudes.numel() >= 4 * SAMPLE and rank < SAMPLE // 4:
        sample = magnitudes[:: magnitudes.numel() // SAMPLE | 1]  # odd: rows of a matrix are often even
        least = torch.topk(sample, rank, sorted=False).values.amin().item()
        # Numpy finds them in a fifth of torch's time.
        candidates = torch.from_numpy(np.flatnonzero(~(magnitudes.numpy() < least)))
        if candidates.numel() >= count:
            is_chosen = torch.zeros(candidates.numel(), dtype=torch.bool)
            is_chosen[torch.topk(magnitudes[candidates], count, sorted=False).indices] = True
            return candidates[is_chosen]
    return torch.topk(magnitudes, count, sorted=False).indices.sort().values


@register_compressor("randomk", feedback=True)
@dataclass(unsafe_hash=True)
class RandomK(_Sparse):
    """Sends the share `ratio` of the elements, drawn anew for each tensor, one out of every 1 / ratio; others are zero.

    The draw follows from `seed` and a number that travels along, so no places are sent; all ranks draw the same, so a
    mean loses nothing when it is encoded again. Where any element is an infinity or a NaN, all that are drawn are NaN:
    otherwise an overflow would hardly ever be seen. It needs error feedback, which the name `randomk` includes. The
    number of the next draw is state, one per bucket.
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
        if values.numel():  # a NaN is the least and the greatest; isfinite() on all takes ten times as long
            chosen = torch.where(torch.stack(torch.aminmax(values)).isfinite().all(), chosen, math.nan)
        payload[:NUMBER_BYTES].copy_(number.view(torch.uint8))
        payload[NUMBER_BYTES:].copy_(chosen.view(torch.uint8))
        self._number += 1

    def _parts(self, payload: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        check_call(self, out, payload)
        number = int(payload[:NUMBER_BYTES].clone().view(torch.int64))
        chosen = payload[NUMBER_BYTES:].clone().view(working_dtype(out.dtype))
        return self._places(number, out), chosen.to(out.dtype)

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
        if not isinstance(state["number"], int):
            raise ConfigError(f"'number' in the state of RandomK is {state['number']!r}, and must be a whole number.")
        self._number = state["number"]


def _check_ratio(ratio: object) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError(f"ratio={ratio!r} must be a number above 0 and at most 1: the share of elements to send.")


def _num_blocks(numel: int) -> int:
    return max(1, -(-numel // BLOCK))


def _count(ratio: float, numel: int) -> int:
    """How many of `numel` elements are sent: at least one, if there are any."""
    return min(numel, max(1, math.ceil(ratio * numel)))
