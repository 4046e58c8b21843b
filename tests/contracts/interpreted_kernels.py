"""The kernels that take many parts at once, and those of four bits, in Triton's interpreter, which needs no GPU.

They give the bits of the CPU. Run by test_parts.py in a process of its own, for Triton decides when it is imported
whether it interprets: ``TRITON_INTERPRET=1 python -m contracts.interpreted_kernels`` in the folder of the tests.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from contracts.values import DTYPES, KINDS, samples
from murmura import Cast, Compressor, MinMaxUInt4, MinMaxUInt8
from murmura.compressors import cast, minmax
from murmura.compressors.base import working_dtype

SHAPES = [(64, 1, 3), (64, 192, 3), (64, 193, 3), (100, 257, 2), (4096, 8192, 2)]  # block, elements, parts


class OnGPU:
    """Inside it torch believes that tensors are on a GPU, where the compressors look for kernels."""

    is_entered = False

    def __enter__(self) -> None:
        OnGPU.is_entered = True

    def __exit__(self, *failure: object) -> None:
        OnGPU.is_entered = False


def pretend() -> None:
    torch.Tensor.is_cuda = property(lambda tensor: OnGPU.is_entered)  # type: ignore[assignment]
    cuda: Any = torch.cuda
    cuda.device = lambda device: contextlib.nullcontext()
    mend_indices()


def mend_indices() -> None:
    """Let the interpreter use its numbers, arrays of one element, as indices: numpy refuses that since 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: number.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, but for the bits of a NaN."""
    return torch.equal(a.nan_to_num(nan=12.5), b.nan_to_num(nan=12.5)) and torch.equal(a.isnan(), b.isnan())


def room(num_bytes: int, offset: int) -> Tensor:
    return torch.full((num_bytes + offset,), 7, dtype=torch.uint8)[offset:]


def results(compressor: Compressor, values: Tensor, num_parts: int, offset: int, methods: Any) -> list[Tensor]:
    """The payloads of the parts, what they decode to, and the payloads of a mean and a sum of several tensors."""
    numel, dtype = values.numel(), values.dtype
    sizes = [compressor.payload_bytes(part.numel(), dtype) for part in values.tensor_split(num_parts)]
    payload, decoded = room(sum(sizes), offset), torch.empty_like(values)
    methods.compress_parts(compressor, values, num_parts, payload)
    methods.decompress_parts(compressor, payload, num_parts, decoded)
    wide = dtype if dtype.itemsize > 2 else torch.float32
    means = [room(compressor.payload_bytes(numel, wide), offset) for _ in range(2)]
    rows = payloads_of(compressor, values, num_parts, offset)
    for divisor, mean in zip((num_parts, 1), means, strict=True):
        methods.compress_mean(compressor, rows, divisor, torch.empty(numel, dtype=wide), mean)
    return [payload, decoded, *means]


def payloads_of(compressor: Compressor, values: Tensor, num_rows: int, offset: int) -> Tensor:
    """Rows of payloads, of multiples of `values` and something else, made by the CPU."""
    before, OnGPU.is_entered = OnGPU.is_entered, False
    size = compressor.payload_bytes(values.numel(), values.dtype)
    rows = room(num_rows * size, offset).view(num_rows, size)
    for number, row in enumerate(rows):
        compressor.compress(values * (number + 1) - number * samples("normal", len(values), values.dtype), row)
    OnGPU.is_entered = before
    return rows


def cases() -> Iterator[tuple[Compressor, str, Tensor, int, int]]:
    """Compressor, kind of values, values, number of parts, and the byte where payloads begin."""
    for dtype, (block, numel, num_parts) in itertools.product(DTYPES, SHAPES):
        for kind in KINDS if block == 100 else ["normal"]:
            for offset in (0, 1) if kind == "normal" else (0,):
                yield MinMaxUInt8(block), kind, samples(kind, numel, dtype), num_parts, offset
    for dtype, target in itertools.product(DTYPES, (torch.bfloat16, torch.float16)):
        if dtype == target or dtype.itemsize > target.itemsize:
            for kind in KINDS:
                yield Cast(target), kind, samples(kind, 1025, dtype), 3, 0


def as_numbers(tensor: Tensor, compressor: Cast) -> Tensor:
    return tensor.view(compressor.dtype) if tensor.dtype == torch.uint8 else tensor


def rounds_badly(compressor: Compressor, values: Tensor) -> bool:
    return values.dtype == torch.bfloat16 or compressor == Cast(torch.bfloat16)


def four_bit_cases() -> Iterator[tuple[Compressor, str, Tensor, int]]:
    """Compressor, kind of values, values, and the byte where the payload begins."""
    for dtype, block in itertools.product(DTYPES, (100, 256)):
        for kind in KINDS if block == 256 else ["normal"]:
            if dtype != torch.bfloat16 or "subnormal" not in kind:  # which the interpreter does not read
                yield MinMaxUInt4(block), kind, samples(kind, 1301, dtype), block % 8 // 4


def there_and_back(compressor: Compressor, values: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    payload = room(compressor.payload_bytes(values.numel(), values.dtype), offset)
    decoded = torch.empty_like(values, dtype=working_dtype(values.dtype))
    compressor.compress(values, payload)
    compressor.decompress(payload, decoded)
    return payload, decoded


def main() -> None:
    """Compare with the CPU; the interpreter does not round bfloat16, so there with the kernels that take one part."""
    warnings.simplefilter("ignore")
    pretend()
    device, num_cases, num_wrong = torch.device("cpu"), 0, 0
    assert minmax._cuda_part_kernels(device) is not None
    assert cast._cuda_kernels(device) is not None
    for compressor, kind, values, num_parts, offset in cases():
        case = compressor, values, num_parts, offset
        num_cases += 1
        with OnGPU():
            found = results(*case, type(compressor))
        with OnGPU() if rounds_badly(compressor, values) else contextlib.nullcontext():
            expected = results(*case, Compressor)
        if isinstance(compressor, Cast):  # payloads are numbers, of which a NaN has many bits
            found, expected = ([as_numbers(each, compressor) for each in some] for some in (found, expected))
        for what, one, other in zip(("payload", "decoded", "mean", "sum"), found, expected, strict=True):
            if not same(one, other):
                num_wrong += 1
                where = f"{num_parts} parts, offset {offset}"
                print(f"{what}: {compressor!r}, {kind}, {values.numel()} x {values.dtype}, {where}")
    for compressor, kind, values, offset in four_bit_cases():
        num_cases += 1
        expected_pair = there_and_back(compressor, values, offset)
        with OnGPU():
            found_pair = there_and_back(compressor, values, offset)
        for what, one, other in zip(("payload", "decoded"), found_pair, expected_pair, strict=True):
            if not same(one, other):
                num_wrong += 1
                print(f"{what}: {compressor!r}, {kind}, {values.numel()} x {values.dtype}, offset {offset}")
    print(f"{num_cases} cases, {num_wrong} wrong")
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
