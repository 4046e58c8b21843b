"""The conversions of `Cast` on CUDA: one kernel that reads, converts and writes each element once, or adds it.

torch's own conversions move single elements; these move 16 bytes at a time. The results are those of torch, to the bit
(but for the bits of a NaN).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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


def convert(source: Tensor, target: Tensor, *, add: bool = False) -> None:
    """Overwrite `target` with `source`, or add it; both are flat, of one length, and contiguous."""
    numel = source.numel()
    with torch.cuda.device(source.device):
        _convert[(triton.cdiv(numel, WIDTH),)](
            source, target, numel, width=WIDTH, adds=add, num_warps=NUM_WARPS, enable_fp_fusion=False
        )
