"""Remembers what a lossy compressor lost and adds it to the next tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from murmura.compressors.base import Compressor
from murmura.errors import not_built


class ErrorFeedback(Compressor):
    """Compresses tensor + residual with `inner` and keeps the new residual: state, one per bucket."""

    def __init__(self, inner: Compressor) -> None:
        not_built("murmura.ErrorFeedback")

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        not_built("murmura.ErrorFeedback.payload_bytes")

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        not_built("murmura.ErrorFeedback.compress")

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        not_built("murmura.ErrorFeedback.decompress")
