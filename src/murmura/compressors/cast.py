"""Fewer bits per element by a plain change of dtype."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from murmura.compressors.base import PIECE_ELEMENTS, Compressor, check_call, check_encodable
from murmura.compressors.names import register_compressor
from murmura.errors import ConfigError, UsageError

log = logging.getLogger("murmura")

TARGETS = (torch.float16, torch.bfloat16, torch.float32)


@register_compressor("bf16", dtype=torch.bfloat16)
@register_compressor("fp16", dtype=torch.float16)
@dataclass(frozen=True)
class Cast(Compressor):
    """Sends every element as `dtype`, for example torch.bfloat16.

    Values beyond the largest of `dtype` become infinite, as they do under `Tensor.to`: float16 ends at 65504,
    bfloat16 does not end before float32. Values that are of `dtype` already travel as they are.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in TARGETS:
            known = ", ".join(str(each) for each in TARGETS)
            raise ConfigError(f"Cast({self.dtype}) is not possible: name one of {known}. MinMaxUInt8() sends 8 bits.")

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        check_encodable(dtype)
        if dtype != self.dtype and dtype.itemsize <= self.dtype.itemsize:
            raise UsageError(
                f"{self!r} would not make {dtype} values smaller. Cast to fewer bytes, or send them as they are."
            )
        return numel * self.dtype.itemsize

    @property
    def grain(self) -> int:
        return 1

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        check_call(self, tensor, payload)
        tensor = tensor.detach()
        if self._is_aligned(payload):
            self._move(tensor, payload.view(self.dtype))
        else:
            payload.copy_(tensor.to(self.dtype).view(torch.uint8))

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        check_call(self, out, payload)
        self._move(self._values(payload), out.detach())

    def decompress_add(self, payload: Tensor, out: Tensor) -> None:
        check_call(self, out, payload)
        values, out = self._values(payload), out.detach()
        kernels = _cuda_kernels(out.device) if out.is_cuda and out.numel() else None
        if kernels is not None:
            kernels.convert(values, out, add=True)
            return
        piece = PIECE_ELEMENTS if out.is_cpu else max(1, out.numel())  # what torch converts for the sum stays in cache
        for first in range(0, out.numel(), piece):
            out[first : first + piece].add_(values[first : first + piece])

    def compress_parts(self, tensor: Tensor, num_parts: int, payload: Tensor) -> None:
        self.compress(tensor, payload)  # an element's bytes do not depend on where a part begins

    def decompress_parts(self, payload: Tensor, num_parts: int, out: Tensor) -> None:
        self.decompress(payload, out)

    def compress_mean(self, payloads: Tensor, divisor: int, mean: Tensor, out: Tensor) -> None:
        kernels = _cuda_kernels(mean.device) if mean.is_cuda and mean.numel() else None
        if kernels is None or not self._is_aligned(payloads) or not self._is_aligned(out):
            super().compress_mean(payloads, divisor, mean, out)
        else:
            kernels.convert_mean(payloads.view(self.dtype), divisor, out.view(self.dtype), mean.dtype)

    def _move(self, source: Tensor, target: Tensor) -> None:
        if source.is_cuda and source.numel() and source.dtype != target.dtype:
            kernels = _cuda_kernels(source.device)
            if kernels is not None:
                kernels.convert(source, target)
                return
        target.copy_(source)

    def _values(self, payload: Tensor) -> Tensor:
        """`payload` as values of `dtype`: a view where the bytes lie so that there can be one."""
        return (payload if self._is_aligned(payload) else payload.clone()).view(self.dtype)

    def _is_aligned(self, payload: Tensor) -> bool:
        size = self.dtype.itemsize
        return payload.storage_offset() % size == 0 and payload.data_ptr() % size == 0


@functools.cache
def _cuda_kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernels, or None where a first try of them fails: torch's own conversions are as right, and slower."""
    try:
        from murmura.compressors import cast_triton

        halves = torch.empty(2, 1, dtype=torch.bfloat16, device=device)
        cast_triton.convert(torch.zeros(1, device=device), halves[0])
        cast_triton.convert_mean(halves, 2, torch.empty_like(halves[0]), torch.float32)
    except Exception as error:  # Triton's errors have no base in common, and other ones in each version
        log.warning("conversions on %s run on plain torch operations, which are slower: %s", device, error)
        return None
    return cast_triton
