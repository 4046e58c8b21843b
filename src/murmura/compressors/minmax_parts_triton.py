"""The codes of `MinMaxUInt8` of many parts at once on CUDA: one kernel each to encode them, decode them, and average.

The parts of a tensor are those of `Tensor.tensor_split`, the first of them perhaps an element longer than the others;
their payloads lie end to end, and so begin at any byte. Values and payloads are those that `minmax_triton` gives part
by part, to the bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from murmura.compressors import minmax_plain as plain
from murmura.compressors.base import working_dtype
from murmura.compressors.minmax_triton import (
    DECODED_PER_WARP,
    ENCODED_PER_WARP,
    LONGEST_BLOCK,
    LONGEST_TILE,
    NAMES,
    decoded,
    divide,
    encoded,
    grid_constants,
    shape,
)

__all__ = ["LONGEST_BLOCK", "decode_parts", "encode_mean", "encode_parts"]


@triton.jit
def _place(part, length, num_longer, part_bytes, more_bytes, grain: tl.constexpr):
    """Where part number `part` begins in the tensor and in the payload, and how many elements it has.

    All parts have the same length if there is a `grain`, of which `part_bytes` is a multiple: memory moves in vectors
    as long as the compiler knows places to be multiples of.
    """
    begin, numel = part * length, part * 0 + length
    place = tl.multiple_of(part * part_bytes, grain) if grain else part * part_bytes
    if not grain:
        longer = tl.minimum(part, num_longer)  # of those before it
        begin += longer
        place += longer * more_bytes
        numel += tl.minimum(part + 1, num_longer) - longer
    return begin, place, numel


@triton.jit
def _store_header(address, base, step, integer: tl.constexpr, is_aligned: tl.constexpr):
    """Write two numbers to bytes that lie as numbers do if `is_aligned`, and else anywhere."""
    size: tl.constexpr = integer.primitive_bitwidth // 8
    if is_aligned:
        numbers = address.to(tl.pointer_type(base.dtype))
        tl.store(numbers, base)
        tl.store(numbers + 1, step)
    else:
        byte = tl.arange(0, size)
        tl.store(address + byte, (base.to(integer, bitcast=True) >> (8 * byte)).to(tl.uint8))
        tl.store(address + size + byte, (step.to(integer, bitcast=True) >> (8 * byte)).to(tl.uint8))


@triton.jit
def _load_header(address, dtype: tl.constexpr, integer: tl.constexpr, is_aligned: tl.constexpr):
    size: tl.constexpr = integer.primitive_bitwidth // 8
    if is_aligned:
        numbers = address.to(tl.pointer_type(dtype))
        base, step = tl.load(numbers), tl.load(numbers + 1)
    else:
        byte = tl.arange(0, size)
        base = tl.sum(tl.load(address + byte).to(integer) << (8 * byte), 0).to(integer).to(dtype, bitcast=True)
        step = tl.sum(tl.load(address + size + byte).to(integer) << (8 * byte), 0).to(integer).to(dtype, bitcast=True)
    return base, step


@triton.jit
def _encode_block(
    values, codes, header, count, width: tl.constexpr, is_masked: tl.constexpr, is_aligned: tl.constexpr,
    dtype: tl.constexpr, integer: tl.constexpr, magic: tl.constexpr, few_bits: tl.constexpr,
    smallest_lifted: tl.constexpr,
):  # fmt: skip
    inside = tl.arange(0, width)
    is_there = inside < count if is_masked else None
    x = tl.load(values + inside, mask=is_there).to(dtype)
    code, base, step = encoded(x, is_there, is_masked, dtype, integer, magic, few_bits, smallest_lifted)
    tl.store(codes + inside, code, mask=is_there)
    _store_header(header, base, step, integer, is_aligned)


@triton.jit
def _encode_parts(
    values, payload, length, num_longer, part_bytes, more_bytes, block, width: tl.constexpr, grain: tl.constexpr,
    is_aligned: tl.constexpr, dtype: tl.constexpr, integer: tl.constexpr, magic: tl.constexpr, few_bits: tl.constexpr,
    smallest_lifted: tl.constexpr,
):  # fmt: skip
    """A program encodes a block of `block` elements, or what is left for it, of a part."""
    header_bytes: tl.constexpr = integer.primitive_bitwidth // 4
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    begin, place, numel = _place(part, length, num_longer, part_bytes, more_bytes, grain)
    count = tl.minimum(numel - index * block, block).to(tl.int32)
    values += begin + index * block
    codes = payload + place + index * block
    header = payload + place + numel + index * header_bytes
    if count == width:  # whole: memory moves in vectors
        _encode_block(
            values, codes, header, count, width, False, is_aligned, dtype, integer, magic, few_bits, smallest_lifted
        )
    elif count > 0:
        _encode_block(
            values, codes, header, count, width, True, is_aligned, dtype, integer, magic, few_bits, smallest_lifted
        )


@triton.jit
def _decode_tile(
    codes, header, out, count, width: tl.constexpr, is_masked: tl.constexpr, is_aligned: tl.constexpr,
    dtype: tl.constexpr, integer: tl.constexpr, limit: tl.constexpr,
):  # fmt: skip
    inside = tl.arange(0, width)
    is_there = inside < count if is_masked else None
    code = tl.load(codes + inside, mask=is_there)
    base, step = _load_header(header, dtype, integer, is_aligned)
    tl.store(out + inside, decoded(code, base, step, dtype, limit).to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _decode_parts(
    payload, out, length, num_longer, part_bytes, more_bytes, block, num_tiles, width: tl.constexpr,
    grain: tl.constexpr, is_aligned: tl.constexpr, dtype: tl.constexpr, integer: tl.constexpr, limit: tl.constexpr,
):  # fmt: skip
    """A program decodes a tile of `width` elements, or what is left for it; `num_tiles` make a block."""
    header_bytes: tl.constexpr = integer.primitive_bitwidth // 4
    index, part = (tl.program_id(0) // num_tiles).to(tl.int64), tl.program_id(1).to(tl.int64)
    first = (tl.program_id(0) % num_tiles).to(tl.int64) * width
    begin, place, numel = _place(part, length, num_longer, part_bytes, more_bytes, grain)
    count = (tl.minimum(numel - index * block, block) - first).to(tl.int32)
    codes = payload + place + index * block + first
    header = payload + place + numel + index * header_bytes
    out += begin + index * block + first
    if count >= width:
        _decode_tile(codes, header, out, count, width, False, is_aligned, dtype, integer, limit)
    elif count > 0:
        _decode_tile(codes, header, out, count, width, True, is_aligned, dtype, integer, limit)


@triton.jit
def _encode_mean_of_block(
    codes, headers, out_codes, out_header, count, num_parts, part_bytes, grain: tl.constexpr, divisor: tl.constexpr,
    width: tl.constexpr, is_masked: tl.constexpr, is_aligned: tl.constexpr, dtype: tl.constexpr, integer: tl.constexpr,
    limit: tl.constexpr, magic: tl.constexpr, few_bits: tl.constexpr, smallest_lifted: tl.constexpr,
):  # fmt: skip
    inside = tl.arange(0, width)
    is_there = inside < count if is_masked else None
    base, step = _load_header(headers, dtype, integer, is_aligned)
    total = decoded(tl.load(codes + inside, mask=is_there), base, step, dtype, limit)
    for part in range(1, num_parts):
        place = tl.multiple_of(tl.cast(part, tl.int64) * part_bytes, grain)
        base, step = _load_header(headers + place, dtype, integer, is_aligned)
        total += decoded(tl.load(codes + place + inside, mask=is_there), base, step, dtype, limit)
    if divisor != 1:
        total = divide(total, tl.full((), divisor, dtype))
    code, base, step = encoded(total, is_there, is_masked, dtype, integer, magic, few_bits, smallest_lifted)
    tl.store(out_codes + inside, code, mask=is_there)
    _store_header(out_header, base, step, integer, is_aligned)


@triton.jit
def _encode_mean(
    payloads, out, numel, num_parts, part_bytes, block, grain: tl.constexpr, divisor: tl.constexpr,
    width: tl.constexpr, is_aligned: tl.constexpr, dtype: tl.constexpr, integer: tl.constexpr, limit: tl.constexpr,
    magic: tl.constexpr, few_bits: tl.constexpr, smallest_lifted: tl.constexpr,
):  # fmt: skip
    """A program decodes a block of each of `num_parts` payloads, adds them up in order, divides, and encodes that."""
    header_bytes: tl.constexpr = integer.primitive_bitwidth // 4
    index = tl.program_id(0).to(tl.int64)
    count = tl.minimum(numel - index * block, block).to(tl.int32)
    codes, headers = index * block, numel + index * header_bytes
    if count == width:
        _encode_mean_of_block(
            payloads + codes, payloads + headers, out + codes, out + headers, count, num_parts, part_bytes, grain,
            divisor, width, False, is_aligned, dtype, integer, limit, magic, few_bits, smallest_lifted,
        )  # fmt: skip
    else:
        _encode_mean_of_block(
            payloads + codes, payloads + headers, out + codes, out + headers, count, num_parts, part_bytes, grain,
            divisor, width, True, is_aligned, dtype, integer, limit, magic, few_bits, smallest_lifted,
        )  # fmt: skip


def encode_parts(values: Tensor, num_parts: int, payload: Tensor, block: int) -> None:
    """Fill `payload` with those of the parts of `values`, each in blocks of `block` elements, the last one shorter."""
    dtype = working_dtype(values.dtype)
    layout = _layout(values.numel(), num_parts, payload, block, dtype)
    longest = -(-values.numel() // num_parts)
    constants = {**grid_constants(dtype), **shape(triton.next_power_of_2(min(block, longest)), ENCODED_PER_WARP)}
    with torch.cuda.device(values.device):
        _encode_parts[(triton.cdiv(longest, block), num_parts)](values, payload, **layout, block=block, **constants)


def decode_parts(payload: Tensor, out: Tensor, num_parts: int, block: int) -> None:
    """Overwrite `out` with what `encode_parts` has encoded."""
    dtype = working_dtype(out.dtype)
    layout = _layout(out.numel(), num_parts, payload, block, dtype)
    longest = -(-out.numel() // num_parts)
    width = min(triton.next_power_of_2(min(block, longest)), LONGEST_TILE)
    num_tiles = triton.cdiv(min(block, longest), width)
    constants = {
        "dtype": NAMES[dtype],
        "integer": NAMES[plain.INTEGERS[dtype]],
        "limit": torch.finfo(out.dtype).max,
        **shape(width, DECODED_PER_WARP),
    }
    with torch.cuda.device(out.device):
        _decode_parts[(triton.cdiv(longest, block) * num_tiles, num_parts)](
            payload, out, **layout, block=block, num_tiles=num_tiles, **constants
        )


def encode_mean(payloads: Tensor, divisor: int, out: Tensor, numel: int, dtype: torch.dtype, block: int) -> None:
    """Fill `out` with the payload of the sum, divided, of the `numel` values of `dtype` in each row of `payloads`."""
    num_parts, part_bytes = payloads.shape
    constants = {
        **grid_constants(dtype),
        "limit": torch.finfo(dtype).max,
        "grain": math.gcd(part_bytes, 16),
        "is_aligned": _are_aligned([payloads, out], numel, part_bytes, dtype),
        **shape(triton.next_power_of_2(min(block, numel)), ENCODED_PER_WARP),
    }
    with torch.cuda.device(payloads.device):
        _encode_mean[(triton.cdiv(numel, block),)](
            payloads, out, numel, num_parts, part_bytes, block, divisor=divisor, **constants
        )


def _layout(numel: int, num_parts: int, payload: Tensor, block: int, dtype: torch.dtype) -> dict[str, int | bool]:
    """How the parts lie, as the kernels are told."""
    length, num_longer = divmod(numel, num_parts)
    header_bytes = 2 * dtype.itemsize
    part_bytes = length + header_bytes * -(-length // block)
    return {
        "length": length,
        "num_longer": num_longer,
        "part_bytes": part_bytes,
        "more_bytes": 1 if length % block else 1 + header_bytes,  # behind full blocks an element begins another
        "grain": 0 if num_longer else math.gcd(part_bytes, 16),
        "is_aligned": num_longer == 0 and _are_aligned([payload], length, part_bytes, dtype),
    }


def _are_aligned(payloads: list[Tensor], numel: int, part_bytes: int, dtype: torch.dtype) -> bool:
    """Whether the headers behind `numel` codes of each part lie as numbers of `dtype` do."""
    starts = [payload.data_ptr() + numel for payload in payloads]
    return all(each % dtype.itemsize == 0 for each in (part_bytes, *starts))
