"""Four bits per element, with the range of each block beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from murmura.compressors import minmax_plain
from murmura.compressors.base import Compressor, check_call, check_encodable
from murmura.compressors.minmax import kernels_for
from murmura.compressors.names import register_compressor
from murmura.errors import ConfigError


@register_compressor("uint4", feedback=True)
@dataclass(frozen=True)
class MinMaxUInt4(Compressor):
    """15 steps between the minimum and the maximum of each block; zero is exact where a block spans it.

    As `MinMaxUInt8`, with steps that are 17 times as long: hence short blocks, and error feedback by default where it
    is asked for by name. `block_size` is an even number of elements.
    """

    block_size: int = 256

    def __post_init__(self) -> None:
        size = self.block_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 2 or size % 2:
            raise ConfigError(f"block_size={size!r} is not an even number of elements. Give 2 or more; 256 is usual.")

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        check_encodable(dtype)
        return -(-numel // 2) + minmax_plain.header_bytes(dtype) * -(-numel // self.block_size)

    @property
    def grain(self) -> int:
        return self.block_size

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        check_call(self, tensor, payload)
        if tensor.numel():
            kernels_for(tensor).encode_pairs(tensor.detach(), payload, min(tensor.numel(), self.block_size))

    def compress_to_loss(self, tensor: Tensor, payload: Tensor, decoded: Tensor | None = None) -> None:
        if not tensor.is_cpu:
            super().compress_to_loss(tensor, payload, decoded)
            return
        check_call(self, tensor, payload)
        if tensor.numel():
            minmax_plain.encode_pairs_to_loss(tensor.detach(), payload, min(tensor.numel(), self.block_size), decoded)

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        check_call(self, out, payload)
        if out.numel():
            kernels_for(out).decode_pairs(payload, out.detach(), min(out.numel(), self.block_size), add=False)

    def decompress_add(self, payload: Tensor, out: Tensor) -> None:
        check_call(self, out, payload)
        if out.numel():
            kernels_for(out).decode_pairs(payload, out.detach(), min(out.numel(), self.block_size), add=True)
