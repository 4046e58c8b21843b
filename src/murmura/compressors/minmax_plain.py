"""The code of `MinMaxUInt8` and `MinMaxUInt4` in plain torch operations: the rule, on every device.

A payload holds a byte for each element, or one for two of them, the first in its low half; then (base, step) for each
block, in fp32, or fp64 for fp64 values. An element is code * step + base. Codes go up to `levels`, 255 or 15.

- A step has 8 significant bits fewer than its dtype, so code * step is exact, and the element is rounded once, whether
  or not a compiler fuses the multiplication with the addition: the same bits on every device.
- Where a block spans zero, base is -zero * step for a whole number `zero` of steps: zero is on the grid, exactly.
  Elsewhere base is the minimum.
- A step is a little longer than range / levels, by 2**-17 to 2**-14 of it (fp64: 2**-46 to 2**-43). The slack keeps
  codes inside 0 .. levels however they were rounded: nothing has to be clamped, and nothing can wrap.
- A block whose range is tiny is scaled up by a power of two for its codes, so that 1 / step is finite.
- Where the range overflows, base and step are 2**-8 of what they should be, and step is negative to say so.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from murmura.compressors.base import PIECE_ELEMENTS, working_dtype

LIFT, TINY = 2.0**64, 2.0**-60  # ranges below TINY are scaled by LIFT
SINK = 2.0**-8  # and those that overflow by SINK
ROUND_UP, DROPPED_BITS = 0x180, 0xFF  # of a step's bit pattern

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
NUMPY_INTEGERS = {torch.float32: np.int32, torch.float64: np.int64}
MAGIC = {torch.float32: 1.5 * 2.0**23, torch.float64: 1.5 * 2.0**52}  # added to t, leaves round(t) in the low bits
SMALLEST = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}
FEW_BITS = {torch.float32: 2**15, torch.float64: 2**44}  # a whole number up to here times a code is exact


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

    @property
    def is_usual(self) -> bool:
        """Whether no block needs an anchor or a lift: then encoding takes two operations less, to the same bits."""
        return bool(((self.anchor == 0) & (self.lift == 1) & self.is_finite).all())


def grid_of(low: Tensor, high: Tensor, levels: int = 255) -> Grid:
    """The grids of blocks with these minima and maxima, which are of a working dtype."""
    if not low.is_cpu:
        return Grid(*_grid(torch, low, high, levels, low.dtype, INTEGERS[low.dtype]))
    with np.errstate(all="ignore"):
        fields = _grid(np, low.numpy(), high.numpy(), levels, low.dtype, NUMPY_INTEGERS[low.dtype])
    return Grid(*map(torch.from_numpy, fields))


def _grid(xp: Any, low: Any, high: Any, levels: int, dtype: torch.dtype, integer: Any) -> tuple[Any, ...]:
    """The fields of a `Grid`, by torch or, on a CPU, by numpy: the same bits, and less time for few blocks."""
    spread = high - low
    overflows, is_constant = spread == math.inf, spread == 0
    spans_zero = (low <= 0) & (high >= 0) & ~is_constant
    one, nought = xp.ones_like(spread), xp.zeros_like(spread)
    lift = xp.where((spread < TINY) & ~is_constant, one * LIFT, one)
    raw = xp.where(overflows, high * SINK - low * SINK, spread * lift) * (1 / levels)
    rounded = ((raw.view(integer) + ROUND_UP) & ~DROPPED_BITS).view(raw.dtype)
    # Among the last of the subnormals a step has few bits by itself, and the next one is a unit longer.
    unit = SMALLEST[dtype] * LIFT
    step = xp.where(is_constant, nought, xp.where(raw < FEW_BITS[dtype] * unit, raw + unit, rounded) / lift)
    inverse = xp.where(is_constant, nought, 1 / (step * lift))
    lift = xp.where(overflows, one * SINK, lift)
    anchor = xp.where(spans_zero, nought, low)
    zero = xp.where(spans_zero, levels - xp.floor(high * lift * inverse + 0.5), nought)
    base = anchor - zero * step + 0.0  # no negative zero, which devices may tell apart
    is_finite = xp.isfinite(low) & xp.isfinite(high)
    nan = one * math.nan
    step = xp.where(is_finite, xp.where(overflows, -step, step), nan)
    return xp.where(is_finite, base, nan), step, anchor, lift, inverse, zero, is_finite


def encode(values: Tensor, payload: Tensor, block: int) -> None:
    """Fill `payload` from `values` in blocks of `block` elements, the last one shorter."""
    numel = values.numel()
    payload[numel:].copy_(quantise(values, payload[:numel], block, 255))


def encode_pairs(values: Tensor, payload: Tensor, block: int) -> None:
    """As `encode`, with codes of four bits, two in a byte."""
    codes = torch.zeros(values.numel() + values.numel() % 2, dtype=torch.uint8, device=values.device)
    headers = quantise(values, codes[: values.numel()], block, 15)
    num_pairs = codes.numel() // 2
    if sys.byteorder == "little":  # two codes are one number of 16 bits: half the time of strides of two
        pairs = codes.view(torch.int16)
        payload[:num_pairs].copy_(pairs.bitwise_or_(pairs >> 4))  # the low byte
    else:
        torch.bitwise_or(codes[::2], codes[1::2] << 4, out=payload[:num_pairs])
    payload[num_pairs:].copy_(headers)


def quantise(values: Tensor, codes: Tensor, block: int, levels: int) -> Tensor:
    """Fill `codes` from `values`, and return the headers of the blocks, as bytes."""
    dtype = working_dtype(values.dtype)
    scratch = torch.empty(piece_elements(values), dtype=dtype, device=values.device)
    parts = sections(values, block)
    low, high = (torch.cat(each) for each in zip(*(extremes(rows, dtype) for rows in parts), strict=True))
    grid = grid_of(low, high, levels)
    shift = grid.zero + MAGIC[dtype]
    is_usual = values.is_cpu and grid.is_usual
    first = 0
    for rows, row_codes in zip(parts, sections(codes, block), strict=True):
        for down, across in pieces(rows):
            blocks, source = slice(first + down.start, first + down.stop), rows[down, across]
            scaled = scratch[: source.numel()].view(source.shape)
            if is_usual:
                torch.mul(source, grid.inverse[blocks], out=scaled)
            else:
                torch.sub(source, grid.anchor[blocks], out=scaled).mul_(grid.lift[blocks]).mul_(grid.inverse[blocks])
            row_codes[down, across].copy_(scaled.add_(shift[blocks]).view(INTEGERS[dtype]))  # an integer's low byte
        if not is_usual:
            row_codes.mul_(grid.is_finite[first : first + len(rows)])
        first += len(rows)
    return torch.cat((grid.base, grid.step), 1).view(-1).view(torch.uint8)


def decode(payload: Tensor, out: Tensor, block: int, *, add: bool) -> None:
    """Overwrite `out` from `payload`, or add to it."""
    dequantise(payload[: out.numel()], payload[out.numel() :], out, block, 255, add=add)


def decode_pairs(payload: Tensor, out: Tensor, block: int, *, add: int) -> None:
    """As `decode`, of what `encode_pairs` made; with an `add` of -1 subtract from it."""
    pairs = payload[: -(-out.numel() // 2)]
    if sys.byteorder == "little":
        wide = pairs.to(torch.int16)
        codes = wide.bitwise_or_(wide << 4).bitwise_and_(0x0F0F).view(torch.uint8)[: out.numel()]
    else:
        codes = torch.stack((pairs & 15, pairs >> 4), 1).view(-1)[: out.numel()]
    dequantise(codes, payload[pairs.numel() :], out, block, 15, add=add)


def dequantise(codes: Tensor, header_bytes: Tensor, out: Tensor, block: int, levels: int, *, add: int) -> None:
    """Overwrite `out` from its codes and the headers of its blocks, or add to it `add` times."""
    dtype = working_dtype(out.dtype)
    base, step = header_bytes.clone().view(dtype).view(-1, 2).tensor_split(2, 1)
    limit = torch.finfo(out.dtype).max
    in_place = out.dtype == dtype and not add
    scratch = torch.empty(0 if in_place else piece_elements(out), dtype=dtype, device=out.device)
    is_usual = out.is_cpu and _is_far_from_overflow(base.numpy(), step.numpy(), levels, limit)
    rise = None if is_usual else torch.ones_like(step).masked_fill_(step < 0, 1 / SINK)
    step = step if is_usual else step.abs()
    first = 0
    for rows, row_codes in zip(sections(out, block), sections(codes, block), strict=True):
        for down, across in pieces(rows):
            blocks, target = slice(first + down.start, first + down.stop), rows[down, across]
            decoded = target if in_place else scratch[: target.numel()].view(target.shape)
            decoded.copy_(row_codes[down, across]).mul_(step[blocks]).add_(base[blocks])
            if rise is not None:
                decoded.mul_(rise[blocks]).clamp_(-limit, limit)
            if add:
                target.add_(decoded.to(out.dtype), alpha=int(add))
            elif not in_place:
                target.copy_(decoded)
        first += len(rows)


def _is_far_from_overflow(base: Any, step: Any, levels: int, limit: float) -> bool:
    """Whether all blocks decode without a rise and a limit; not if one holds a NaN."""
    with np.errstate(all="ignore"):
        return bool(((step >= 0) & (step * levels + np.abs(base) < limit)).all())


def extremes(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The minimum and the maximum of each row, NaN where it holds one."""
    height = max(1, piece_elements(rows) // rows.shape[1])
    bands = [rows[top : top + height] for top in range(0, len(rows), height)]
    found = [(torch.amin(band, 1, True), torch.amax(band, 1, True)) for band in bands]
    low, high = (torch.cat(parts).to(dtype) for parts in zip(*found, strict=True))
    return low, high


def sections(flat: Tensor, block: int) -> list[Tensor]:
    """Views with a row for each block: of those that are whole, and of a shorter one at the end."""
    whole = flat.numel() - flat.numel() % block
    parts = (flat[:whole].view(-1, block), flat[whole:].view(1, -1))
    return [part for part in parts if part.numel()]


def pieces(rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of parts that are not larger than they should be; short rows stay together."""
    num_rows, width = rows.shape
    most = piece_elements(rows)
    height = max(1, most // width)
    for top in range(0, num_rows, height):
        down = slice(top, min(top + height, num_rows))
        for left in range(0, width, most):
            yield down, slice(left, left + most)


def piece_elements(tensor: Tensor) -> int:
    """How many elements to take at a time: on devices that are no CPU all of them."""
    return min(tensor.numel(), PIECE_ELEMENTS) if tensor.is_cpu else tensor.numel()
