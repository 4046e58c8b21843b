"""The contract of a compressor: pure tensor code that turns values into bytes of a size known beforehand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor


class Compressor(ABC):
    """Encodes a flat tensor into a uint8 payload and back.

    The size of a payload depends on the length and dtype alone: no length prefix travels, and buffers are
    reused. The same payload decodes to the same bits on every rank and every device.
    """

    @abstractmethod
    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The exact number of bytes that `numel` elements of `dtype` take."""

    @abstractmethod
    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        """Fill `payload` from `tensor`, which is only read."""

    @abstractmethod
    def decompress(self, payload: Tensor, out: Tensor) -> None:
        """Overwrite `out` from `payload`, which is only read."""

    def for_bucket(self) -> Self:
        """The compressor of one bucket of one model; one that carries state returns a fresh object."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """What must travel in a checkpoint for a run to continue bit for bit."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # most carry no state
        """Take over what `state_dict` returned."""
