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

    def usual(self, levels: int) -> Tensor:
        """Which blocks need no anchor, no lift, and nothing that keeps them from overflow."""
        return (self.anchor == 0) & (self.lift == 1) & (self.step * (2 * levels) < torch.finfo(self.step.dtype).max)


def grid_of(low: Tensor, high: Tensor, levels: int = 255) -> Grid:
    """The grids of blocks with these minima and maxima, which are of a working dtype."""
    if not low.is_cpu:
        return Grid(*_grid(torch, low, high, levels, low.dtype, INTEGERS[low.dtype]))
    lows, highs = low.numpy(), high.numpy()
    with np.errstate(all="ignore"):
        spread = highs - lows
        span_zero = ((lows <= 0) & (highs >= 0) & (spread >= TINY) & (spread < math.inf)).all()
        grid = _grid_about_zero if span_zero else _grid
        fields = grid(np, lows, highs, levels, low.dtype, NUMPY_INTEGERS[low.dtype])
    return Grid(*map(torch.from_numpy, fields))


def _grid_about_zero(xp: Any, low: Any, high: Any, levels: int, dtype: torch.dtype, integer: Any) -> tuple[Any, ...]:
    """As `_grid`, of blocks that span zero and are neither tiny nor huge: what is usual, in a third of the time."""
    raw = (high - low) * (1 / levels)
    step = ((raw.view(integer) + ROUND_UP) & ~DROPPED_BITS).view(raw.dtype)
    inverse = 1 / step
    zero = levels - xp.floor(high * inverse + 0.5)
    nought, one = xp.zeros_like(step), xp.ones_like(step)
    return nought - zero * step + 0.0, step, nought, one, inverse, zero, one > 0


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
    nan = xp.full_like(spread, math.nan)  # not a product, which is another NaN on a GPU
    step = xp.where(is_finite, xp.where(overflows, -step, step), nan)
    return xp.where(is_finite, base, nan), step, anchor, lift, inverse, zero, is_finite


def encode(values: Tensor, payload: Tensor, block: int) -> None:
    """Fill `payload` from `values` in blocks of `block` elements, the last one shorter."""
    quantise(values, payload, block, 255)


def encode_pairs(values: Tensor, payload: Tensor, block: int) -> None:
    """As `encode`, with codes of four bits, two in a byte."""
    quantise(values, payload, block, 15)


def encode_pairs_to_loss(values: Tensor, payload: Tensor, block: int, decoded: Tensor | None = None) -> None:
    """As `encode_pairs`; `values` become what is lost of them, zero where that is not finite.

    `decoded` gets what the payload holds.
    """
    quantise(values, payload, block, 15, keeps_loss=True, decoded=decoded)


def quantise(
    values: Tensor, payload: Tensor, block: int, levels: int, *, keeps_loss: bool = False, decoded: Tensor | None = None
) -> None:
    """Fill `payload`. What becomes of `values` if it `keeps_loss`, and of `decoded`: see `encode_pairs_to_loss`."""
    dtype = working_dtype(values.dtype)
    low, high = (
        torch.cat(each) for each in zip(*(extremes(rows, dtype) for rows in sections(values, block)), strict=True)
    )
    grid = grid_of(low, high, levels)
    shift = grid.zero + MAGIC[dtype]
    usual = grid.usual(levels).numpy() if values.is_cpu else None
    codes, headers = parts_of(payload, values.numel(), levels)
    headers.copy_(torch.cat((grid.base, grid.step), 1).view(-1).view(torch.uint8))
    header_bytes = headers.numel() // len(low)
    scratch = torch.empty(piece_elements(values), dtype=dtype, device=values.device)
    room = _room_for_pairs(values, levels)
    for span, blocks in pieces(values, block):
        source = values[span].view(len(low[blocks]), -1)
        scaled = scratch[: source.numel()].view(source.shape)
        is_usual = usual is not None and bool(usual[blocks].all())
        if is_usual:
            torch.mul(source, grid.inverse[blocks], out=scaled)
        else:
            torch.sub(source, grid.anchor[blocks], out=scaled).mul_(grid.lift[blocks]).mul_(grid.inverse[blocks])
        integers = scaled.add_(shift[blocks]).view(INTEGERS[dtype])  # the code is the low byte
        if not is_usual:
            integers.mul_(grid.is_finite[blocks])
        written = codes[_bytes_of(span, levels)]
        _write(integers.view(-1), written, room)
        if not keeps_loss:
            continue
        found = None if decoded is None else decoded[span].view(source.shape)
        if is_usual and values.dtype == dtype:
            # Here base is -zero * step, so that an element is (code - zero) * step, exactly.
            found = scaled if found is None else found
            source.sub_(torch.mul(scaled.sub_(shift[blocks]), grid.step[blocks], out=found))
        else:
            found = torch.empty_like(source) if found is None else found
            piece_headers = headers[blocks.start * header_bytes : blocks.stop * header_bytes]
            dequantise(written, piece_headers, found.view(-1), source.shape[1], levels, add=False)
            source.sub_(found).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _write(integers: Tensor, codes: Tensor, room: Tensor | None) -> None:
    """Fill `codes` from the low bytes of `integers`: a byte each, or with a `room` for pairs one for two of them."""
    if room is None:
        codes.copy_(integers)
        return
    pairs = room[0, : codes.numel()]
    unpaired = pairs.view(torch.uint8)
    unpaired[integers.numel() :].zero_()
    unpaired[: integers.numel()].copy_(integers)
    if sys.byteorder == "little":  # two codes are one number of 16 bits: half the time of strides of two
        shifted = torch.bitwise_right_shift(pairs, 4, out=room[1, : codes.numel()])
        codes.copy_(pairs.bitwise_or_(shifted))  # the low byte
    else:
        torch.bitwise_or(unpaired[::2], unpaired[1::2] << 4, out=codes)


def _read(codes: Tensor, numel: int, room: Tensor | None) -> Tensor:
    """`numel` codes of a byte each: what `_write` was given."""
    if room is None:
        return codes
    if sys.byteorder == "little":
        pairs = room[0, : codes.numel()].copy_(codes)
        high = torch.bitwise_right_shift(pairs, 4, out=room[1, : codes.numel()])
        return pairs.add_(high, alpha=256 - 16).view(torch.uint8)[:numel]
    return torch.stack((codes & 15, codes >> 4), 1).view(-1)[:numel]


def _room_for_pairs(flat: Tensor, levels: int) -> Tensor | None:
    """Where the codes of a piece are joined to pairs or taken apart, twice; None if each has a byte of its own."""
    most = -(-piece_elements(flat) // 2)
    return None if levels == 255 else torch.empty((2, most), dtype=torch.int16, device=flat.device)


def decode(payload: Tensor, out: Tensor, block: int, *, add: bool) -> None:
    """Overwrite `out` from `payload`, or add to it."""
    dequantise(*parts_of(payload, out.numel(), 255), out, block, 255, add=add)


def decode_pairs(payload: Tensor, out: Tensor, block: int, *, add: bool) -> None:
    """As `decode`, of what `encode_pairs` made."""
    dequantise(*parts_of(payload, out.numel(), 15), out, block, 15, add=add)


def dequantise(codes: Tensor, headers: Tensor, out: Tensor, block: int, levels: int, *, add: bool) -> None:
    """Overwrite `out` from its codes and the headers of its blocks, or add to it."""
    dtype = working_dtype(out.dtype)
    base, step = headers.clone().view(dtype).view(-1, 2).t().contiguous().unsqueeze(2)
    limit = torch.finfo(out.dtype).max
    in_place = out.dtype == dtype and not add
    scratch = torch.empty(0 if in_place else piece_elements(out), dtype=dtype, device=out.device)
    is_usual = out.is_cpu and _is_far_from_overflow(base.numpy(), step.numpy(), levels, limit)
    rise = None if is_usual else torch.ones_like(step).masked_fill_(step < 0, 1 / SINK)
    step = step if is_usual else step.abs()
    room = _room_for_pairs(out, levels)
    for span, blocks in pieces(out, block):
        target = out[span].view(len(step[blocks]), -1)
        decoded = target if in_place else scratch[: target.numel()].view(target.shape)
        decoded.copy_(_read(codes[_bytes_of(span, levels)], target.numel(), room).view(target.shape))
        decoded.mul_(step[blocks]).add_(base[blocks])
        if rise is not None:
            decoded.mul_(rise[blocks]).clamp_(-limit, limit)
        if add:
            target.add_(decoded.to(out.dtype))
        elif not in_place:
            target.copy_(decoded)


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


def parts_of(payload: Tensor, numel: int, levels: int) -> tuple[Tensor, Tensor]:
    """The codes of `numel` elements, and the headers behind them."""
    end = _bytes_of(slice(0, numel), levels).stop
    return payload[:end], payload[end:]


def _bytes_of(span: slice, levels: int) -> slice:
    """Where the codes of `span` are, which begins at an even place if there are two in a byte."""
    return span if levels == 255 else slice(span.start // 2, -(-span.stop // 2))


def sections(flat: Tensor, block: int) -> list[Tensor]:
    """Views with a row for each block: of those that are whole, and of a shorter one at the end."""
    whole = flat.numel() - flat.numel() % block
    parts = (flat[:whole].view(-1, block), flat[whole:].view(1, -1))
    return [part for part in parts if part.numel()]


def pieces(flat: Tensor, block: int) -> Iterator[tuple[slice, slice]]:
    """Elements, and the blocks that they belong to, of parts that are not larger than they should be."""
    numel, most = flat.numel(), piece_elements(flat)
    num_whole, height = numel // block, max(1, most // block)
    bands = [slice(top, min(top + height, num_whole)) for top in range(0, num_whole, height)]
    if numel % block:
        bands.append(slice(num_whole, num_whole + 1))
    for blocks in bands:
        end = min(blocks.stop * block, numel)
        for start in range(blocks.start * block, end, most):
            yield slice(start, min(start + most, end)), blocks


def piece_elements(tensor: Tensor) -> int:
    """How many elements to take at a time: on devices that are no CPU all of them."""
    return min(tensor.numel(), PIECE_ELEMENTS) if tensor.is_cpu else tensor.numel()
