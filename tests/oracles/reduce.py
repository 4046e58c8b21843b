"""What an all-reduce must return, to the bit: plain loops over plain tensors, slow and obvious.

A buffer is small when (ranks - 1) x bytes is at most 256 KiB; it is reduced in rank order. A larger one is cut into a
chunk for each rank, and chunk i is reduced beginning with rank i. A mean is the sum divided by the number of ranks.
fp16 and bf16 are accumulated in fp32 and rounded once, or, by a ring with larger buffers, after each of its hops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


def all_reduce(inputs: Sequence[Tensor], op: str, *, ring: bool = False) -> Tensor:
    """The result on every rank, of the ranks' flat `inputs`; `ring` if it is made hop by hop."""
    ranks = len(inputs)
    length = inputs[0].numel()
    if ranks == 1:
        return inputs[0].clone()
    if (ranks - 1) * length * inputs[0].element_size() <= 256 * 1024:
        return fold(inputs, op)
    chunks = []
    start = 0
    for chunk in range(ranks):
        stop = start + length // ranks + (1 if chunk < length % ranks else 0)
        in_order = [inputs[(chunk + hop) % ranks][start:stop] for hop in range(ranks)]
        chunks.append(fold(in_order, op, round_each_hop=ring))
        start = stop
    return torch.cat(chunks)


def fold(parts: Sequence[Tensor], op: str, *, round_each_hop: bool = False) -> Tensor:
    """Combine `parts` from the first to the last."""
    dtype = parts[0].dtype
    half = dtype in HALVES
    total = parts[0].float() if half else parts[0].clone()
    for number, part in enumerate(parts[1:], start=1):
        total = combine(total, part.float() if half else part, op)
        if half and round_each_hop and number < len(parts) - 1:
            total = total.to(dtype).float()
    if op == "mean":
        total = divide(total, len(parts))
    return total.to(dtype)


def combine(one: Tensor, other: Tensor, op: str) -> Tensor:
    if op in ("sum", "mean"):
        return one + other
    if op == "product":
        return one * other
    if op == "min":
        return torch.minimum(one, other)
    if op == "max":
        return torch.maximum(one, other)
    if op in ("band", "bor", "bxor"):
        return {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op](one, other)
    raise AssertionError(op)


def divide(total: Tensor, count: int) -> Tensor:
    """Each real number divided by `count`, and rounded once; a complex number is two of them."""
    if total.is_complex():
        return torch.view_as_complex(torch.view_as_real(total) / count)
    return total / count
