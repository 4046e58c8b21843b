"""Eight bits per element, with the range of each block beside it."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from murmura.compressors import minmax_plain
from murmura.compressors.base import Compressor, check_call, check_encodable
from murmura.compressors.names import register_compressor
from murmura.errors import ConfigError

log = logging.getLogger("murmura")


@register_compressor("uint8")
@dataclass(frozen=True)
class MinMaxUInt8(Compressor):
    """255 steps between the minimum and the maximum of each block; zero is exact where a block spans it.

    `block_size` is in elements; None makes one block of the whole tensor. An element is off by half a step of its
    block (255 steps make its range) and the dtype's own rounding at most; a block of equal values is exact. A block
    that holds an infinity or a NaN decodes to NaN, and no other block does. docs/design/eight-bits.md has the layout.
    """

    block_size: int | None = 4096

    def __post_init__(self) -> None:
        size = self.block_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ConfigError(
                f"block_size={size!r} is not a number of elements. Give 1 or more (4096 is usual), or None for one "
                "block of the whole tensor."
            )

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        check_encodable(dtype)
        return numel + minmax_plain.header_bytes(dtype) * -(-numel // self._block(numel))

    @property
    def grain(self) -> int | None:
        return self.block_size

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        check_call(self, tensor, payload)
        if tensor.numel():
            kernels_for(tensor).encode(tensor.detach(), payload, self._block(tensor.numel()))

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        check_call(self, out, payload)
        if out.numel():
            kernels_for(out).decode(payload, out.detach(), self._block(out.numel()), add=False)

    def decompress_add(self, payload: Tensor, out: Tensor) -> None:
        check_call(self, out, payload)
        if out.numel():
            kernels_for(out).decode(payload, out.detach(), self._block(out.numel()), add=True)

    def compress_parts(self, tensor: Tensor, num_parts: int, payload: Tensor) -> None:
        kernels, block = self._part_kernels(tensor), self.block_size
        if kernels is None or block is None or not tensor.numel():
            super().compress_parts(tensor, num_parts, payload)
        else:
            kernels.encode_parts(tensor.detach(), num_parts, payload, block)

    def decompress_parts(self, payload: Tensor, num_parts: int, out: Tensor) -> None:
        kernels, block = self._part_kernels(out), self.block_size
        if kernels is None or block is None or not out.numel():
            super().decompress_parts(payload, num_parts, out)
        else:
            kernels.decode_parts(payload, out.detach(), num_parts, block)

    def compress_mean(self, payloads: Tensor, divisor: int, mean: Tensor, out: Tensor) -> None:
        kernels, block = self._part_kernels(mean), self.block_size
        if kernels is None or block is None or not mean.numel():
            super().compress_mean(payloads, divisor, mean, out)
        else:
            kernels.encode_mean(payloads, divisor, out, mean.numel(), mean.dtype, block)

    def _part_kernels(self, tensor: Tensor) -> ModuleType | None:
        """What takes all parts of `tensor` at once, if anything does."""
        if not tensor.is_cuda or self.block_size is None:
            return None
        kernels = _cuda_part_kernels(tensor.device)
        return kernels if kernels is not None and self.block_size <= kernels.LONGEST_BLOCK else None

    def _block(self, numel: int) -> int:
        """The length of each block but the last, which is what remains."""
        return max(1, numel if self.block_size is None else min(numel, self.block_size))


def kernels_for(tensor: Tensor) -> ModuleType:
    """The fastest implementation that can take `tensor`; all of them give the same bits."""
    return _cuda_kernels(tensor.device) if tensor.is_cuda else minmax_plain


@functools.cache
def _cuda_kernels(device: torch.device) -> ModuleType:
    """The Triton kernels, or the plain operations where a first try of Triton fails.

    It may be missing, find no C compiler, or not support the device.
    """
    try:
        from murmura.compressors import minmax_triton

        payload = torch.empty(1 + minmax_plain.header_bytes(torch.float32), dtype=torch.uint8, device=device)
        minmax_triton.encode(torch.zeros(1, device=device), payload, 1)
    except Exception as error:  # Triton's errors have no base in common, and other ones in each version
        log.warning("quantisation on %s runs on plain torch operations, which are slower: %s", device, error)
        return minmax_plain
    return minmax_triton


@functools.cache
def _cuda_part_kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernels that take many parts at once, or None where a first try of one fails: parts go one by one."""
    if _cuda_kernels(device) is minmax_plain:
        return None
    try:
        from murmura.compressors import minmax_parts_triton

        values, payload = torch.zeros(2, device=device), torch.empty(18, dtype=torch.uint8, device=device)
        minmax_parts_triton.encode_parts(values, 2, payload, 1)
        minmax_parts_triton.encode_mean(payload.view(2, 9), 2, torch.empty_like(payload[:9]), 1, values.dtype, 1)
        minmax_parts_triton.decode_parts(payload, values, 2, 1)
    except Exception as error:  # Triton's errors have no base in common, and other ones in each version
        log.warning("quantisation on %s takes a kernel for each rank's part, which is slower: %s", device, error)
        return None
    return minmax_parts_triton
