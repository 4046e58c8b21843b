"""What MinMaxUInt8 and MinMaxUInt4 must write and read, one element after the other: docs/design/eight-bits.md.

Arithmetic is that of numpy's scalars, which round after every operation; whole numbers are Python's.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor


def blocks_of(numel: int, block_size: int | None) -> list[tuple[int, int]]:
    size = max(numel, 1) if block_size is None else block_size
    return [(first, min(first + size, numel)) for first in range(0, numel, size)]


def encode(values: Tensor, block_size: int | None, levels: int = 255) -> bytes:
    """The payload: all codes, two in a byte if they go up to 15 only, then all headers."""
    double = values.dtype == torch.float64
    number: Any = np.float64 if double else np.float32
    codes, headers = bytearray(), b""
    with np.errstate(all="ignore"):
        for first, last in blocks_of(values.numel(), block_size):
            block = [number(value) for value in values[first:last].tolist()]
            block_codes, base, step = encode_block(block, number, levels)
            codes += bytes(block_codes)
            headers += struct.pack("<dd" if double else "<ff", base, step)
    if levels == 15:
        codes += bytes(len(codes) % 2)
        codes = bytearray(low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True))
    return bytes(codes) + headers


def encode_block(block: list[Any], number: Any, levels: int) -> tuple[list[int], float, float]:
    if not all(math.isfinite(value) for value in block):
        return [0] * len(block), math.nan, math.nan
    low, high = min(block), max(block)
    if low == high:
        return [0] * len(block), float(low) + 0.0, 0.0
    spread = high - low
    if math.isinf(spread):
        scale, sunk = number(2.0**-8), high * number(2.0**-8) - low * number(2.0**-8)
        step = lengthened(sunk * number(1 / levels), number)
        inverse = number(1) / step
    else:
        scale = number(2.0**64) if spread < 2.0**-60 else number(1)
        step = lengthened(spread * scale * number(1 / levels), number) / scale
        inverse = number(1) / (step * scale)
    if low > 0 or high < 0:
        anchor, zero = low, 0
    else:
        anchor, zero = number(0), levels - math.floor(high * scale * inverse + number(0.5))
    codes = [round_to_even((value - anchor) * scale * inverse, zero) for value in block]
    assert all(0 <= code <= levels for code in codes), codes
    base = float(anchor) - zero * float(step) + 0.0
    return codes, base, -float(step) if math.isinf(spread) else float(step)


def lengthened(raw: Any, number: Any) -> Any:
    """The next step that is longer by half a unit or more, of 16 significant bits (fp64: 45)."""
    kept, smallest = (16, -149) if number is np.float32 else (45, -1074)
    unit = 2.0 ** (smallest + 64)
    if raw < 2.0 ** (kept - 1) * unit:
        return number(float(np.float64(raw)) + unit) if number is np.float32 else raw + number(unit)
    fraction, exponent = math.frexp(float(raw))  # 0.5 <= fraction < 1
    units = fraction * 2**kept  # exact
    return number(math.ldexp(math.floor(units + 1.5), exponent - kept))


def round_to_even(scaled: Any, zero: int) -> int:
    """The whole number nearest to scaled + zero; of two, the even one."""
    return round(float(scaled) + zero) if abs(float(scaled)) < 2**20 else -1


def decode(payload: bytes, numel: int, dtype: torch.dtype, block_size: int | None, levels: int = 255) -> Tensor:
    """The values in `dtype`."""
    if levels == 15:
        pairs, headers = payload[: -(-numel // 2)], payload[-(-numel // 2) :]
        payload = bytes(code for pair in pairs for code in (pair % 16, pair // 16))[:numel] + headers
    double = dtype == torch.float64
    number: Any = np.float64 if double else np.float32
    header = struct.Struct("<dd" if double else "<ff")
    limit = torch.finfo(dtype).max
    out = torch.empty(numel, dtype=torch.float64)
    with np.errstate(all="ignore"):
        for index, (first, last) in enumerate(blocks_of(numel, block_size)):
            base, step = (number(field) for field in header.unpack_from(payload, numel + index * header.size))
            scale = number(256 if step < 0 else 1)
            for place in range(first, last):
                value = (number(payload[place]) * abs(step) + base) * scale
                out[place] = float(value if math.isnan(value) else min(max(value, -limit), limit))
    return out.to(torch.float64 if double else torch.float32).to(dtype)
