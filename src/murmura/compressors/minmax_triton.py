"""The eight-bit code of `MinMaxUInt8` on CUDA: one kernel to encode, one to decode or to decode and add.

The rule is that of `minmax_plain`, whose names are used here, and so are the results, to the bit (but for the bits of a
NaN). Each element is read and written once. Nothing here may be fused into another rounding: hence `enable_fp_fusion`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from murmura.compressors import minmax_plain as plain

LONGEST_BLOCK = 2**14  # a longer one does not fit into the registers of one program
LONGEST_TILE = 2**10
ENCODED_PER_WARP, DECODED_PER_WARP = 2**10, 2**9  # elements; the fastest of those that were tried on an H200

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
def _encode(
    values,
    codes,
    headers,
    block,
    width: tl.constexpr,
    is_masked: tl.constexpr,
    dtype: tl.constexpr,
    integer: tl.constexpr,
    magic: tl.constexpr,
    few_bits: tl.constexpr,
    smallest_lifted: tl.constexpr,
):
    """A program encodes a block of `block` elements; `width`, a power of two, is as many unless `is_masked`."""
    index = tl.program_id(0).to(tl.int64)
    values += index * block  # long numbers are for the beginning alone: they cost registers
    codes += index * block
    inside = tl.arange(0, width)
    if is_masked:
        is_there = inside < block
        x = tl.load(values + inside, mask=is_there, other=0.0).to(dtype)
        low = tl.reduce(tl.where(is_there, x, INFINITY), 0, _lower)
        high = tl.reduce(tl.where(is_there, x, -INFINITY), 0, _higher)
    else:
        x = tl.load(values + inside).to(dtype)
        low = tl.reduce(x, 0, _lower)
        high = tl.reduce(x, 0, _higher)
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
    raw = tl.where(overflows, high * SINK - low * SINK, spread * lift) * tl.full((), 1 / 255, dtype)
    rounded = ((raw.to(integer, bitcast=True) + ROUND_UP) & ~DROPPED_BITS).to(dtype, bitcast=True)
    step = tl.where(raw < unit * few_bits, raw + unit, rounded) * tl.where(is_tiny, one / LIFT, one)
    step = tl.where(is_constant, nought, step)
    inverse = tl.where(is_constant, nought, _divide(one, tl.where(is_constant, one, step * lift)))
    lift = tl.where(overflows, SINK * one, lift)
    anchor = tl.where(spans_zero, nought, low)
    top = tl.floor(high * lift * inverse + 0.5)
    zero = tl.where(spans_zero, 255 - top, nought)
    base = anchor - zero * step + 0.0
    step = tl.where(overflows, -step, step)

    shift = zero + tl.full((), magic, dtype)
    code = ((x - anchor) * lift * inverse + shift).to(integer, bitcast=True) & 0xFF
    code = tl.where(is_finite, code, 0).to(tl.uint8)
    if is_masked:
        tl.store(codes + inside, code, mask=is_there)
    else:
        tl.store(codes + inside, code)
    tl.store(headers + 2 * index, tl.where(is_finite, base, float("nan")))
    tl.store(headers + 2 * index + 1, tl.where(is_finite, step, float("nan")))


@triton.jit
def _divide(a, b):
    return tl.math.div_rn(a, b) if a.dtype == tl.float32 else a / b


@triton.jit
def _decode(
    codes,
    headers,
    out,
    block,
    num_tiles,
    width: tl.constexpr,
    is_masked: tl.constexpr,
    dtype: tl.constexpr,
    limit: tl.constexpr,
    adds: tl.constexpr,
):
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
    most = tl.full((), limit, dtype)
    rise = tl.where(step < 0, 1 / SINK, 1.0).to(dtype)
    decoded = (code.to(dtype) * tl.abs(step) + base) * rise
    decoded = _lower(_higher(decoded, -most), most).to(out.dtype.element_ty)
    if adds:
        decoded = (tl.load(out + inside, mask=is_there).to(dtype) + decoded.to(dtype)).to(out.dtype.element_ty)
    tl.store(out + inside, decoded, mask=is_there)


def encode(values: Tensor, payload: Tensor, block: int) -> None:
    """Fill `payload` from `values` in blocks of `block` elements, the last one shorter."""
    if block > LONGEST_BLOCK:
        plain.encode(values, payload, block)
        return
    numel, dtype = values.numel(), plain.working_dtype(values.dtype)
    behind = payload[numel:]
    # Bytes that begin anywhere cannot be written as numbers: those are written elsewhere and copied.
    headers = (behind if _is_aligned(behind, dtype) else torch.empty_like(behind)).view(dtype)
    width = triton.next_power_of_2(block)
    constants = {
        "dtype": _NAMES[dtype],
        "integer": _NAMES[plain.INTEGERS[dtype]],
        "magic": plain.MAGIC[dtype],
        "few_bits": plain.FEW_BITS[dtype],
        "smallest_lifted": plain.SMALLEST[dtype] * plain.LIFT,
        **_shape(width, ENCODED_PER_WARP),
    }
    whole, rest = divmod(numel, block)
    with torch.cuda.device(values.device):
        if whole:
            _encode[(whole,)](values, payload, headers, block, is_masked=block != width, **constants)
        if rest:
            done = numel - rest
            _encode[(1,)](values[done:], payload[done:], headers[2 * whole :], rest, is_masked=True, **constants)
    if headers.data_ptr() != behind.data_ptr():
        behind.copy_(headers.view(torch.uint8))


def decode(payload: Tensor, out: Tensor, block: int, *, add: bool) -> None:
    """Overwrite `out` from `payload`, or add to it."""
    numel, dtype = out.numel(), plain.working_dtype(out.dtype)
    behind = payload[numel:]
    headers = (behind if _is_aligned(behind, dtype) else behind.clone()).view(dtype)
    width = min(triton.next_power_of_2(block), LONGEST_TILE)
    constants = {
        "dtype": _NAMES[dtype],
        "limit": torch.finfo(out.dtype).max,
        "adds": add,
        **_shape(width, DECODED_PER_WARP),
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


_NAMES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


def _shape(width: int, elements_per_warp: int) -> dict[str, object]:
    """How a program of `width` elements is compiled."""
    num_warps = min(8, max(1, width // elements_per_warp))
    return {"width": width, "num_warps": num_warps, "enable_fp_fusion": False}


def _is_aligned(payload: Tensor, dtype: torch.dtype) -> bool:
    return payload.storage_offset() % dtype.itemsize == 0 and payload.data_ptr() % dtype.itemsize == 0
