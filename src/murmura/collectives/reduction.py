"""The arithmetic of a reduction, once, for every collective: same dtype, same library, same bits.

fp16 and bf16 are accumulated in fp32 and rounded once at the end; all else is computed in its own dtype. On the
CPU the arithmetic is numpy's (its calls cost a third of torch's), on other devices torch's, and so it is where torch's
intra-op threads are to share the work: for sums of floats, which are one rounded operation in both.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmura.errors import UsageError
from murmura.types import ReduceOp, parse

__all__ = ["Reduction", "check_reducible", "divide"]

EXACT_IN_HALVES = 2**8  # whole numbers up to this
HALVES = (torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REDUCIBLE = (
    *HALVES, torch.float32, torch.float64, torch.complex64, torch.complex128, *INTEGERS, torch.bool
)  # fmt: skip

BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)

_NUMPY = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_TORCH = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MEAN: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def check_reducible(op: ReduceOp | str, dtype: torch.dtype) -> ReduceOp:
    """Return `op` as an enum, or raise a `UsageError` if it has no meaning for `dtype`."""
    op = parse(ReduceOp, op, "op")
    if dtype not in REDUCIBLE:
        raise UsageError(f"{dtype} cannot be reduced. Cast it first; reducible: {_names(REDUCIBLE)}.")
    if op is ReduceOp.MEAN and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"the mean of {dtype} is not a whole number, so it is refused rather than rounded. "
            "Cast to a floating dtype first, or use op='sum' and divide as you need."
        )
    if op is ReduceOp.SUM and dtype is torch.bool:
        raise UsageError("the sum of torch.bool is ambiguous: use op='max' for any, op='min' for all, or cast.")
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        raise UsageError(f"complex numbers have no order, so op='{op}' of {dtype} is refused.")
    if op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(f"op='{op}' combines bits, and {dtype} is a number: use an integer dtype or torch.bool.")
    return op


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


class Reduction:
    """One `op` over `world_size` inputs of one dtype; `op` and dtype have passed `check_reducible`.

    It computes on *arrays*: what `array` makes of a flat contiguous tensor, a numpy view or the tensor itself.
    """

    def __init__(
        self, op: ReduceOp, dtype: torch.dtype, world_size: int, device: torch.device, *, threaded: bool = False
    ) -> None:
        self.op = op
        self.world_size = world_size
        threaded &= op in (ReduceOp.SUM, ReduceOp.MEAN) and dtype in (torch.float32, torch.float64)
        self.uses_numpy = device.type == "cpu" and dtype not in HALVES and not threaded
        self._mean = op is ReduceOp.MEAN and world_size > 1
        # A sum of two is rounded once whether it passes through fp32 or not, so it need not. Minima are never rounded.
        wide = dtype in HALVES and op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT)
        self._wide = wide and not (world_size == 2 and op is not ReduceOp.MEAN)
        self._combine: Any = (_NUMPY if self.uses_numpy else _TORCH)[op]
        # Inside this context numpy does not warn of infinities that meet: they are the caller's, and torch does not.
        context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        self._quietly = context.run
        # x * 2^-k and x / 2^k are the same number, rounded once; multiplying is faster.
        self._exact = world_size & (world_size - 1) == 0
        if self._mean and self.uses_numpy:
            self._scale = np.multiply if self._exact else np.divide
            # An array of no dimensions costs numpy half of what a Python number does.
            self._complex = dtype.is_complex
            self._operand = torch.tensor(1.0 / world_size if self._exact else world_size, dtype=dtype.to_real()).numpy()

    def array(self, flat: Tensor) -> Any:
        """A view of `flat` in the form `reduce` takes."""
        return flat.detach().numpy() if self.uses_numpy else flat.detach()

    def reduce(self, inputs: Sequence[Any], out: Any) -> None:
        """Combine `inputs` in the order given, finish (divide, for a mean) and write `out`.

        `out` may be the first input or the second; it must not overlap any other.
        """
        self._quietly(self._reduce, inputs, out)

    def bound_reduce(self, even: Sequence[Any], odd: Sequence[Any]) -> Callable[[int, Any], None]:
        """`reduce` of one of two lists of inputs, by parity, with as little Python as can be."""
        both, quietly, combine = (even, odd), self._quietly, self._combine
        if len(even) != 2 or self._wide or self._mean:
            return lambda parity, out: quietly(self._reduce, both[parity], out)
        (even_0, even_1), (odd_0, odd_1) = both

        def combine_pair(parity: int, out: Any) -> None:
            if parity:
                quietly(combine, odd_0, odd_1, out=out)
            else:
                quietly(combine, even_0, even_1, out=out)

        return combine_pair

    def combine(self, accumulated: Any, own: Any, *, last: bool) -> None:
        """One hop of a ring: own ← accumulated (op) own, finished if this hop is the last."""
        if last:
            self.reduce((accumulated, own), own)
        else:
            self._quietly(self._combine, accumulated, own, out=own)

    def _reduce(self, inputs: Sequence[Any], out: Any) -> None:
        if self._wide:
            self._reduce_wide(inputs, out)
            return
        combine = self._combine
        combine(inputs[0], inputs[1], out=out)
        for other in inputs[2:]:
            combine(out, other, out=out)
        if self._mean:
            self._divide(out)

    def _reduce_wide(self, inputs: Sequence[Tensor], out: Tensor) -> None:
        total = inputs[0].float()
        for other in inputs[1:]:
            self._combine(total, other, out=total)
        if self._mean:
            self._divide(total)
        out.copy_(total)

    def _divide(self, total: Any) -> None:
        if self.uses_numpy:
            if self._complex:  # part by part: numpy's complex division rounds more often
                total = total.view(self._operand.dtype)
            self._scale(total, self._operand, out=total)
        elif self._exact:
            total.mul_(1.0 / self.world_size)
        else:
            divide(total, self.world_size)


def divide(total: Tensor, divisor: int) -> None:
    """Divide `total`, in place, to the bits of a CPU: on CUDA a number is turned into 1 / divisor, which is rounded."""
    real = torch.view_as_real(total) if total.is_complex() else total
    if real.is_cuda and (real.dtype not in HALVES or divisor <= EXACT_IN_HALVES):
        real.div_(torch.full((), divisor, dtype=real.dtype, device=real.device))
    else:
        real.div_(divisor)
