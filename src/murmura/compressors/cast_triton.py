"""The conversions of `Cast` on CUDA: one kernel that reads, converts and writes each element once, or adds it, and one
that averages payloads.

torch's own conversions move single elements; these move 16 bytes at a time. The results are those of torch, to the bit
(but for the bits of a NaN).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from murmura.compressors.minmax_triton import NAMES, divide

WIDTH, NUM_WARPS = 2**10, 4  # of a program, in elements and warps; the fastest of those that were tried on an H200


@triton.jit
def _convert(source, target, numel, width: tl.constexpr, adds: tl.constexpr):
    """A program converts `width` elements."""
    first = tl.program_id(0).to(tl.int64) * width
    inside = tl.arange(0, width)
    is_there = inside < numel - first
    x = tl.load(source + first + inside, mask=is_there)
    if x.dtype == tl.float64:
        x = x.to(tl.float32)  # as torch does: half types are rounded twice
    x = x.to(target.dtype.element_ty)
    if adds:
        x = tl.load(target + first + inside, mask=is_there) + x
    tl.store(target + first + inside, x, mask=is_there)


@triton.jit
def _convert_mean(source, target, numel, num_rows, divisor: tl.constexpr, dtype: tl.constexpr, width: tl.constexpr):
    """A program adds up `width` elements of each row, in their order, divides, and converts that."""
    first = tl.program_id(0).to(tl.int64) * width
    inside = tl.arange(0, width)
    is_there = inside < numel - first
    source += first
    total = tl.load(source + inside, mask=is_there).to(dtype)
    for _ in range(1, num_rows):
        source += numel
        total += tl.load(source + inside, mask=is_there).to(dtype)
    if divisor != 1:
        total = divide(total, tl.full((), divisor, dtype))
    if dtype == tl.float64:
        total = total.to(tl.float32)
    tl.store(target + first + inside, total.to(target.dtype.element_ty), mask=is_there)


def convert(source: Tensor, target: Tensor, *, add: bool = False) -> None:
    """Overwrite `target` with `source`, or add it; both are flat, of one length, and contiguous."""
    numel = source.numel()
    with torch.cuda.device(source.device):
        _convert[(triton.cdiv(numel, WIDTH),)](
            source, target, numel, width=WIDTH, adds=add, num_warps=NUM_WARPS, enable_fp_fusion=False
        )


def convert_mean(rows: Tensor, divisor: int, target: Tensor, dtype: torch.dtype) -> None:
    """Overwrite `target` with the sum of `rows` in their order, divided, all in `dtype`: float32 or float64."""
    num_rows, numel = rows.shape
    with torch.cuda.device(rows.device):
        _convert_mean[(triton.cdiv(numel, WIDTH),)](
            rows, target, numel, num_rows, divisor=divisor, dtype=NAMES[dtype], width=WIDTH, num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
