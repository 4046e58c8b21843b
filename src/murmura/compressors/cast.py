"""Fewer bits per element by a plain change of dtype."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

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
        convert = _cuda_convert(out.device) if out.is_cuda and out.numel() else None
        if convert is not None:
            convert(values, out, add=True)
            return
        piece = PIECE_ELEMENTS if out.is_cpu else max(1, out.numel())  # what torch converts for the sum stays in cache
        for first in range(0, out.numel(), piece):
            out[first : first + piece].add_(values[first : first + piece])

    def _move(self, source: Tensor, target: Tensor) -> None:
        if source.is_cuda and source.numel() and source.dtype != target.dtype:
            convert = _cuda_convert(source.device)
            if convert is not None:
                convert(source, target)
                return
        target.copy_(source)

    def _values(self, payload: Tensor) -> Tensor:
        """`payload` as values of `dtype`: a view where the bytes lie so that there can be one."""
        return (payload if self._is_aligned(payload) else payload.clone()).view(self.dtype)

    def _is_aligned(self, payload: Tensor) -> bool:
        size = self.dtype.itemsize
        return payload.storage_offset() % size == 0 and payload.data_ptr() % size == 0


@functools.cache
def _cuda_convert(device: torch.device) -> Callable[..., None] | None:
    """The Triton kernel, or None where a first try of it fails: torch's own conversions are as right, and slower."""
    try:
        from murmura.compressors import cast_triton

        cast_triton.convert(torch.zeros(1, device=device), torch.empty(1, dtype=torch.bfloat16, device=device))
    except Exception as error:  # Triton's errors have no base in common, and other ones in each version
        log.warning("conversions on %s run on plain torch operations, which are slower: %s", device, error)
        return None
    return cast_triton.convert
