"""The codes of `MinMaxUInt8` and `MinMaxUInt4` on CUDA: one kernel each to encode, and to decode or decode and add.

The rule is that of `minmax_plain`, whose names are used here, and so are the results, to the bit (but for the bits of a
NaN). Each element is read and written once. Nothing here may be fused into another rounding: hence `enable_fp_fusion`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from murmura.compressors import minmax_plain as plain
from murmura.compressors.base import working_dtype

LONGEST_BLOCK = 2**14  # a longer one does not fit into the registers of one program
LONGEST_TILE = 2**10
ENCODED_PER_WARP, DECODED_PER_WARP = 2**10, 2**9  # elements; the fastest of those that were tried on an H200
PAIRS_TILE = 2**10  # elements that a program takes if blocks are shorter, as those of four bits are
LONGEST_SPAN = tl.constexpr(2**6)  # elements, which a few threads load in vectors

LIFT, TINY, SINK = tl.constexpr(plain.LIFT), tl.constexpr(plain.TINY), tl.constexpr(plain.SINK)
ROUND_UP, DROPPED_BITS = tl.constexpr(plain.ROUND_UP), tl.constexpr(plain.DROPPED_BITS)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _lower(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _higher(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _grid(
    low, high, levels: tl.constexpr, dtype: tl.constexpr, integer: tl.constexpr, few_bits: tl.constexpr,
    smallest_lifted: tl.constexpr,
):  # fmt: skip
    """The fields of `minmax_plain.Grid` of blocks with these minima and maxima."""
    nought = tl.full((), 0.0, dtype)
    one = tl.full((), 1.0, dtype)
    unit = tl.full((), smallest_lifted, dtype)

    spread = high - low
    overflows = spread == INFINITY
    is_constant = spread == 0
    spans_zero = (low <= 0) & (high >= 0) & (spread != 0)
    is_finite = (low - low == 0) & (high - high == 0)
    is_tiny = (spread < TINY) & (spread != 0)
    lift = tl.where(is_tiny, LIFT * one, one)
    raw = tl.where(overflows, high * SINK - low * SINK, spread * lift) * tl.full((), 1 / levels, dtype)
    rounded = ((raw.to(integer, bitcast=True) + ROUND_UP) & ~DROPPED_BITS).to(dtype, bitcast=True)
    step = tl.where(raw < unit * few_bits, raw + unit, rounded) * tl.where(is_tiny, one / LIFT, one)
    step = tl.where(is_constant, nought, step)
    inverse = tl.where(is_constant, nought, divide(one, tl.where(is_constant, one, step * lift)))
    lift = tl.where(overflows, SINK * one, lift)
    anchor = tl.where(spans_zero, nought, low)
    top = tl.floor(high * lift * inverse + 0.5)
    zero = tl.where(spans_zero, levels - top, nought)
    base = tl.where(is_finite, anchor - zero * step + 0.0, float("nan"))
    step = tl.where(is_finite, tl.where(overflows, -step, step), float("nan"))
    return base, step, anchor, lift, inverse, zero, is_finite


@triton.jit
def divide(a, b):
    return tl.math.div_rn(a, b) if a.dtype == tl.float32 else a / b


@triton.jit
def encoded(
    x, is_there, is_masked: tl.constexpr, dtype: tl.constexpr, integer: tl.constexpr, magic: tl.constexpr,
    few_bits: tl.constexpr, smallest_lifted: tl.constexpr,
):  # fmt: skip
    """The codes of a block of values of the working dtype, its base, and its step."""
    low = tl.reduce(tl.where(is_there, x, INFINITY) if is_masked else x, 0, _lower)
    high = tl.reduce(tl.where(is_there, x, -INFINITY) if is_masked else x, 0, _higher)
    grid = _grid(low, high, 255, dtype, integer, few_bits, smallest_lifted)
    base, step, anchor, lift, inverse, zero, is_finite = grid
    shift = zero + tl.full((), magic, dtype)
    code = ((x - anchor) * lift * inverse + shift).to(integer, bitcast=True) & 0xFF
    return tl.where(is_finite, code, 0).to(tl.uint8), base, step


@triton.jit
def decoded(code, base, step, dtype: tl.constexpr, limit: tl.constexpr):
    """The values of these codes, in the working dtype, within those of the dtype they are for."""
    most = tl.full((), limit, dtype)
    rise = tl.where(step < 0, 1 / SINK, 1.0).to(dtype)
    values = (code.to(dtype) * tl.abs(step) + base) * rise
    return _lower(_higher(values, -most), most)


@triton.jit
def _encode(
    values, codes, headers, block, width: tl.constexpr, is_masked: tl.constexpr, dtype: tl.constexpr,
    integer: tl.constexpr, magic: tl.constexpr, few_bits: tl.constexpr, smallest_lifted: tl.constexpr,
):  # fmt: skip
    """A program encodes a block of `block` elements; `width`, a power of two, is as many unless `is_masked`."""
    index = tl.program_id(0).to(tl.int64)
    values += index * block  # long numbers are for the beginning alone: they cost registers
    codes += index * block
    inside = tl.arange(0, width)
    is_there = inside < block if is_masked else None
    x = tl.load(values + inside, mask=is_there).to(dtype)
    code, base, step = encoded(x, is_there, is_masked, dtype, integer, magic, few_bits, smallest_lifted)
    tl.store(codes + inside, code, mask=is_there)
    tl.store(headers + 2 * index, base)
    tl.store(headers + 2 * index + 1, step)


@triton.jit
def _decode(
    codes, headers, out, block, num_tiles, width: tl.constexpr, is_masked: tl.constexpr, dtype: tl.constexpr,
    limit: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    """A program decodes a tile of `width` elements; `num_tiles` make a block."""
    program = tl.program_id(0)
    index = (program // num_tiles).to(tl.int64)
    first = (program % num_tiles).to(tl.int64) * width
    codes += index * block + first
    out += index * block + first
    inside = tl.arange(0, width)
    is_there = inside < block - first if is_masked else None
    code = tl.load(codes + inside, mask=is_there)
    base, step = tl.load(headers + 2 * index), tl.load(headers + 2 * index + 1)
    x = decoded(code, base, step, dtype, limit).to(out.dtype.element_ty)
    if adds:
        x = (tl.load(out + inside, mask=is_there).to(dtype) + x.to(dtype)).to(out.dtype.element_ty)
    tl.store(out + inside, x, mask=is_there)


@triton.jit
def _encode_pairs(
    values, pairs, headers, numel, block, height: tl.constexpr, width: tl.constexpr, is_masked: tl.constexpr,
    dtype: tl.constexpr, integer: tl.constexpr, magic: tl.constexpr, few_bits: tl.constexpr,
    smallest_lifted: tl.constexpr,
):  # fmt: skip
    """A program encodes `height` blocks of `block` elements, each in a row of `width`; those there are, if `is_masked`.

    `block` is even, unless there is one block only. Rows are cut into spans: so few threads share a row, and the grid
    of a block, which each of them computes, costs little.
    """
    span: tl.constexpr = min(width, LONGEST_SPAN)
    first = tl.program_id(0).to(tl.int64) * height
    values += first * block
    pairs += first * (block // 2)
    headers += 2 * first
    left = numel - first * block
    row = tl.arange(0, height)
    row_here, start = row[:, None, None], tl.arange(0, width // span)[None, :, None] * span
    column, byte = tl.arange(0, span)[None, None, :], tl.arange(0, span // 2)[None, None, :]
    places = row_here * block + start + column
    if is_masked:
        is_there = (start + column < block) & (places < left)
        x = tl.load(values + places, mask=is_there, other=0.0).to(dtype)
        low, high = tl.where(is_there, x, INFINITY), tl.where(is_there, x, -INFINITY)
    else:
        x = tl.load(values + places).to(dtype)
        low, high = x, x
    low = tl.reduce(tl.reduce(low, 1, _lower), 1, _lower)
    high = tl.reduce(tl.reduce(high, 1, _higher), 1, _higher)
    base, step, anchor, lift, inverse, zero, is_finite = _grid(low, high, 15, dtype, integer, few_bits, smallest_lifted)
    shift = zero + tl.full((), magic, dtype)
    if tl.min((is_finite & (lift == 1)).to(tl.int32), 0):  # as a rule: spares two instructions an element
        code = (x - _of_rows(anchor)) * _of_rows(inverse) + _of_rows(shift)
    else:
        code = (x - _of_rows(anchor)) * _of_rows(lift) * _of_rows(inverse) + _of_rows(shift)
        code = tl.where(_of_rows(is_finite), code, magic)
    code = (code.to(integer, bitcast=True) & 0xF).to(tl.uint8)
    if is_masked:
        code = tl.where(is_there, code, 0).to(tl.uint8)
    even, odd = tl.split(tl.reshape(code, (height, width // span, span // 2, 2)))
    packed = even | (odd << 4)
    targets = pairs + row_here * (block // 2) + start // 2 + byte
    if is_masked:
        is_byte = (start + 2 * byte < block) & (row_here * block + start + 2 * byte < left)
        tl.store(targets, packed, mask=is_byte)
        is_block = row * block < left
        tl.store(headers + 2 * row, base, mask=is_block)
        tl.store(headers + 2 * row + 1, step, mask=is_block)
    else:
        tl.store(targets, packed)
        tl.store(headers + 2 * row, base)
        tl.store(headers + 2 * row + 1, step)


@triton.jit
def _of_rows(each):
    return each[:, None, None]


@triton.jit
def _decode_pairs(
    pairs, headers, out, numel, block, height: tl.constexpr, width: tl.constexpr, is_masked: tl.constexpr,
    dtype: tl.constexpr, limit: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    """A program decodes what one of `_encode_pairs` has encoded."""
    first = tl.program_id(0).to(tl.int64) * height
    pairs += first * (block // 2)
    headers += 2 * first
    out += first * block
    row = tl.arange(0, height)[:, None]
    column, byte = tl.arange(0, width)[None, :], tl.arange(0, width // 2)[None, :]
    left = numel - first * block
    places = row * block + column
    is_there = (column < block) & (places < left) if is_masked else None
    is_byte = (2 * byte < block) & (row * block + 2 * byte < left) if is_masked else None
    is_block = row * block < left if is_masked else None
    packed = tl.load(pairs + row * (block // 2) + byte, mask=is_byte)
    code = tl.reshape(tl.join(packed & 0xF, packed >> 4), (height, width))
    base = tl.load(headers + 2 * row, mask=is_block)
    step = tl.load(headers + 2 * row + 1, mask=is_block)
    x = decoded(code, base, step, dtype, limit).to(out.dtype.element_ty)
    if adds:
        x = (tl.load(out + places, mask=is_there).to(dtype) + x.to(dtype)).to(out.dtype.element_ty)
    tl.store(out + places, x, mask=is_there)


def encode(values: Tensor, payload: Tensor, block: int) -> None:
    """Fill `payload` from `values` in blocks of `block` elements, the last one shorter."""
    if block > LONGEST_BLOCK:
        plain.encode(values, payload, block)
        return
    numel, dtype = values.numel(), working_dtype(values.dtype)
    behind = payload[numel:]
    headers = _headers_to_write(behind, dtype)
    width = triton.next_power_of_2(block)
    constants = {**grid_constants(dtype), **shape(width, ENCODED_PER_WARP)}
    whole, rest = divmod(numel, block)
    with torch.cuda.device(values.device):
        if whole:
            _encode[(whole,)](values, payload, headers, block, is_masked=block != width, **constants)
        if rest:
            done = numel - rest
            _encode[(1,)](values[done:], payload[done:], headers[2 * whole :], rest, is_masked=True, **constants)
    _bring_home(headers, behind)


def decode(payload: Tensor, out: Tensor, block: int, *, add: bool) -> None:
    """Overwrite `out` from `payload`, or add to it."""
    numel, dtype = out.numel(), working_dtype(out.dtype)
    headers = _headers_to_read(payload[numel:], dtype)
    width = min(triton.next_power_of_2(block), LONGEST_TILE)
    constants = {
        "dtype": NAMES[dtype],
        "limit": torch.finfo(out.dtype).max,
        "adds": add,
        **shape(width, DECODED_PER_WARP),
    }
    whole, rest = divmod(numel, block)
    with torch.cuda.device(out.device):
        if whole:
            tiles = triton.cdiv(block, width)
            _decode[(whole * tiles,)](payload, headers, out, block, tiles, is_masked=block % width != 0, **constants)
        if rest:
            done, tiles = numel - rest, triton.cdiv(rest, width)
            args = (payload[done:], headers[2 * whole :], out[done:], rest, tiles)
            _decode[(tiles,)](*args, is_masked=True, **constants)


def encode_pairs(values: Tensor, payload: Tensor, block: int) -> None:
    """As `encode`, with codes of four bits, two in a byte."""
    if block > LONGEST_BLOCK:
        plain.encode_pairs(values, payload, block)
        return
    numel, dtype = values.numel(), working_dtype(values.dtype)
    behind = payload[-(-numel // 2) :]
    headers = _headers_to_write(behind, dtype)
    constants = {**grid_constants(dtype), **_pairs_shape(block, ENCODED_PER_WARP)}
    with torch.cuda.device(values.device):
        for first, programs, is_masked in _programs(numel, block, constants):
            begin = first * block
            args = (values[begin:], payload[begin // 2 :], headers[2 * first :], numel - begin, block)
            _encode_pairs[(programs,)](*args, is_masked=is_masked, **constants)
    _bring_home(headers, behind)


def decode_pairs(payload: Tensor, out: Tensor, block: int, *, add: bool) -> None:
    """As `decode`, of what `encode_pairs` made."""
    if block > LONGEST_BLOCK:
        plain.decode_pairs(payload, out, block, add=add)
        return
    numel, dtype = out.numel(), working_dtype(out.dtype)
    headers = _headers_to_read(payload[-(-numel // 2) :], dtype)
    constants = {
        "dtype": NAMES[dtype],
        "limit": torch.finfo(out.dtype).max,
        "adds": add,
        **_pairs_shape(block, DECODED_PER_WARP),
    }
    with torch.cuda.device(out.device):
        for first, programs, is_masked in _programs(numel, block, constants):
            begin = first * block
            args = (payload[begin // 2 :], headers[2 * first :], out[begin:], numel - begin, block)
            _decode_pairs[(programs,)](*args, is_masked=is_masked, **constants)


def _programs(numel: int, block: int, constants: dict[str, Any]) -> Iterator[tuple[int, int, bool]]:
    """The launches: the first block, the number of programs, and whether some of their places are empty."""
    height = constants["height"]
    whole = 0 if block != constants["width"] else numel // block // height
    if whole:
        yield 0, whole, False
    rest = triton.cdiv(numel, block) - whole * height
    if rest:
        yield whole * height, triton.cdiv(rest, height), True


def grid_constants(dtype: torch.dtype) -> dict[str, Any]:
    """What the kernels that encode know of the working dtype."""
    return {
        "dtype": NAMES[dtype],
        "integer": NAMES[plain.INTEGERS[dtype]],
        "magic": plain.MAGIC[dtype],
        "few_bits": plain.FEW_BITS[dtype],
        "smallest_lifted": plain.SMALLEST[dtype] * plain.LIFT,
    }


NAMES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


def shape(width: int, elements_per_warp: int) -> dict[str, Any]:
    """How a program of `width` elements is compiled."""
    return {"width": width, **_warps(width, elements_per_warp)}


def _pairs_shape(block: int, elements_per_warp: int) -> dict[str, Any]:
    """How a program is compiled that takes whole blocks, in rows that have a power of two of places."""
    width = max(2, triton.next_power_of_2(block))
    height = max(1, PAIRS_TILE // width)
    return {"height": height, "width": width, **_warps(height * width, elements_per_warp)}


def _warps(elements: int, elements_per_warp: int) -> dict[str, Any]:
    return {"num_warps": min(8, max(1, elements // elements_per_warp)), "enable_fp_fusion": False}


def _headers_to_write(behind: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes that begin anywhere cannot be written as numbers: those are written elsewhere, and `_bring_home` copies."""
    return (behind if _is_aligned(behind, dtype) else torch.empty_like(behind)).view(dtype)


def _bring_home(headers: Tensor, behind: Tensor) -> None:
    if headers.data_ptr() != behind.data_ptr():
        behind.copy_(headers.view(torch.uint8))


def _headers_to_read(behind: Tensor, dtype: torch.dtype) -> Tensor:
    return (behind if _is_aligned(behind, dtype) else behind.clone()).view(dtype)


def _is_aligned(payload: Tensor, dtype: torch.dtype) -> bool:
    return payload.storage_offset() % dtype.itemsize == 0 and payload.data_ptr() % dtype.itemsize == 0
