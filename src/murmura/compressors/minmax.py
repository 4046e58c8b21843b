"""Eight bits per element, with the range of each block beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from murmura.compressors.base import Compressor
from murmura.errors import not_built


@dataclass(frozen=True)
class MinMaxUInt8(Compressor):
    """255 levels between the minimum and the maximum of each block; zero is exact where a block spans it.

    `block_size` is in elements; None makes one block of the whole tensor.
    """

    block_size: int | None = 4096

    def __post_init__(self) -> None:
        not_built("murmura.MinMaxUInt8")

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        not_built("murmura.MinMaxUInt8.payload_bytes")

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        not_built("murmura.MinMaxUInt8.compress")

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        not_built("murmura.MinMaxUInt8.decompress")
