"""The eight-bit code of `MinMaxUInt8` in plain torch operations: the rule, on every device.

A payload holds a byte for each element, then (base, step) for each block, in fp32, or fp64 for fp64 values. An element
is code * step + base.

- A step has 8 significant bits fewer than its dtype, so code * step is exact, and the element is rounded once, whether
  or not a compiler fuses the multiplication with the addition: the same bits on every device.
- Where a block spans zero, base is -zero * step for a whole number `zero` of steps: zero is on the grid, exactly.
  Elsewhere base is the minimum.
- A step is a little longer than range / 255, by 2**-17 to 2**-14 of it (fp64: 2**-46 to 2**-43). The slack keeps codes
  inside 0 .. 255 however they were rounded: nothing has to be clamped, and nothing can wrap.
- A block whose range is tiny is scaled up by a power of two for its codes, so that 1 / step is finite.
- Where the range overflows, base and step are 2**-8 of what they should be, and step is negative to say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

LIFT, TINY = 2.0**64, 2.0**-60  # ranges below TINY are scaled by LIFT
SINK = 2.0**-8  # and those that overflow by SINK
ROUND_UP, DROPPED_BITS = 0x180, 0xFF  # of a step's bit pattern
GROUP_ELEMENTS = 2**20  # blocks whose grids are computed together
PIECE_ELEMENTS = 2**17  # elements that stay in a core's cache

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
MAGIC = {torch.float32: 1.5 * 2.0**23, torch.float64: 1.5 * 2.0**52}  # added to t, leaves round(t) in the low bits
SMALLEST = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}
MARGIN = {torch.float32: 2.0**-11, torch.float64: 2.0**-40}  # the part of the slack that is above the highest code
FEW_BITS = {torch.float32: 2**15, torch.float64: 2**44}  # a whole number up to here times a code is exact


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of `dtype` are computed in, and their headers written in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def header_bytes(dtype: torch.dtype) -> int:
    return 2 * working_dtype(dtype).itemsize


class Grid(NamedTuple):
    """What encodes a block; each field has a row for each block."""

    base: Tensor
    step: Tensor
    anchor: Tensor  # code = round((value - anchor) * lift * inverse) + zero
    lift: Tensor
    inverse: Tensor
    zero: Tensor
    is_finite: Tensor


def grid_of(low: Tensor, high: Tensor) -> Grid:
    """The grids of blocks with these minima and maxima, which are of a working dtype."""
    dtype = low.dtype
    spread = high - low
    overflows, is_constant = spread == math.inf, spread == 0
    spans_zero = (low <= 0) & (high >= 0) & ~is_constant
    lift = torch.ones_like(spread).masked_fill_(spread < TINY, LIFT)
    raw = torch.where(overflows, high * SINK - low * SINK, spread * lift) * (1 / 255)
    rounded = ((raw.view(INTEGERS[dtype]) + ROUND_UP) & ~DROPPED_BITS).view(dtype)
    # Among the last of the subnormals a step has few bits by itself, and the next one is a unit longer.
    unit = SMALLEST[dtype] * LIFT
    step = torch.where(raw < FEW_BITS[dtype] * unit, raw + unit, rounded).div_(lift).masked_fill_(is_constant, 0)
    inverse = (step * lift).reciprocal_().masked_fill_(is_constant, 0)
    lift.masked_fill_(overflows, SINK)
    anchor = low.masked_fill(spans_zero, 0)
    zero = (255 - (high * lift * inverse + (0.5 + MARGIN[dtype])).floor_()).masked_fill_(~spans_zero, 0)
    base = anchor - zero * step + 0.0  # no negative zero, which devices may tell apart
    is_finite = low.isfinite() & high.isfinite()
    for header in (base, step):
        header.masked_fill_(~is_finite, math.nan)
    return Grid(base, torch.where(overflows, -step, step), anchor, lift, inverse, zero, is_finite)


def encode(values: Tensor, payload: Tensor, block: int) -> None:
    """Fill `payload` from `values` in blocks of `block` elements, the last one shorter."""
    numel, dtype = values.numel(), working_dtype(values.dtype)
    codes = payload[:numel]
    headers: list[Tensor] = []
    for first, last, width in groups(numel, block, values.device):
        rows, row_codes = values[first:last].view(-1, width), codes[first:last].view(-1, width)
        low, high = (extreme(rows, 1, True).to(dtype) for extreme in (torch.amin, torch.amax))
        grid = grid_of(low, high)
        headers.append(torch.cat((grid.base, grid.step), 1).view(-1))
        shift = grid.zero + MAGIC[dtype]
        for piece in pieces(rows):
            part = piece[0]
            scaled = rows[piece].to(dtype) - grid.anchor[part]
            scaled.mul_(grid.lift[part]).mul_(grid.inverse[part]).add_(shift[part])
            row_codes[piece].copy_(scaled.view(INTEGERS[dtype]))  # an integer's low byte
        row_codes.mul_(grid.is_finite)
    payload[numel:].copy_(torch.cat(headers).view(torch.uint8))


def decode(payload: Tensor, out: Tensor, block: int, *, add: bool) -> None:
    """Overwrite `out` from `payload`, or add to it."""
    numel, dtype = out.numel(), working_dtype(out.dtype)
    codes = payload[:numel]
    headers = payload[numel:].clone().view(dtype).view(-1, 2)
    limit = torch.finfo(out.dtype).max
    start = 0
    for first, last, width in groups(numel, block, out.device):
        rows, row_codes = out[first:last].view(-1, width), codes[first:last].view(-1, width)
        base, step = headers[start : start + len(rows)].tensor_split(2, 1)
        start += len(rows)
        rise = torch.ones_like(step).masked_fill_(step < 0, 1 / SINK)
        step = step.abs()
        for piece in pieces(rows):
            part = piece[0]
            decoded = row_codes[piece].to(dtype)
            decoded.mul_(step[part]).add_(base[part]).mul_(rise[part]).clamp_(-limit, limit)
            if add:
                rows[piece].add_(decoded.to(out.dtype))
            else:
                rows[piece].copy_(decoded)


def groups(numel: int, block: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
    """Consecutive ranges [first, last) of whole blocks, each with its width; a shorter last block stands alone."""
    whole = numel - numel % block
    stride = max(1, GROUP_ELEMENTS // block) * block if device.type == "cpu" else max(whole, 1)
    for first in range(0, whole, stride):
        yield first, min(first + stride, whole), block
    if whole < numel:
        yield whole, numel, numel - whole


def pieces(rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """Parts of `rows` that stay in the cache together."""
    num_rows, width = rows.shape
    if rows.device.type != "cpu":
        yield slice(None), slice(None)
        return
    height, breadth = max(1, PIECE_ELEMENTS // width), PIECE_ELEMENTS
    for top in range(0, num_rows, height):
        for left in range(0, width, breadth):
            yield slice(top, top + height), slice(left, left + breadth)
