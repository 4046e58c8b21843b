"""Fewer bits per element by a plain change of dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from murmura.compressors.base import Compressor
from murmura.errors import not_built


@dataclass(frozen=True)
class Cast(Compressor):
    """Sends every element as `dtype`, for example torch.bfloat16."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        not_built("murmura.Cast")

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        not_built("murmura.Cast.payload_bytes")

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        not_built("murmura.Cast.compress")

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        not_built("murmura.Cast.decompress")
