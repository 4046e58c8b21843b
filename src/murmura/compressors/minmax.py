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
