"""Remembers what a lossy compressor lost and adds it to the next tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from murmura.compressors.base import Compressor, check_call
from murmura.errors import ConfigError, UsageError


@dataclass(unsafe_hash=True)
class ErrorFeedback(Compressor):
    """Compresses tensor + residual with `inner` and keeps the new residual: state, one per bucket.

    The residual has the dtype and length of the tensors. Where it is not finite it is dropped, so that one overflowed
    step does not poison those that follow. Only the share `decay` of it counts, so that what waits long fades. Two are
    equal when their choices are: the residual does not count.
    """

    inner: Compressor
    decay: float = field(default=1.0, kw_only=True)
    _residual: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _is_lent: bool = field(default=False, init=False, repr=False, compare=False)  # somebody holds the residual

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise ConfigError(f"ErrorFeedback({self.inner!r}) wraps no compressor. Write ErrorFeedback(MinMaxUInt8()).")
        if isinstance(self.inner, ErrorFeedback):
            raise ConfigError(f"{self.inner!r} feeds its errors back already. Wrap the compressor inside it, once.")
        if isinstance(self.decay, bool) or not isinstance(self.decay, int | float) or not 0 < self.decay <= 1:
            raise ConfigError(f"decay={self.decay!r} must be a number above 0 and at most 1.")

    @property
    def gathers(self) -> bool:
        return self.inner.gathers

    @property
    def is_uneven(self) -> bool:
        return self.inner.is_uneven

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return self.inner.payload_bytes(numel, dtype)

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        self._compress(tensor, payload, None)

    def compress_decoding(self, tensor: Tensor, payload: Tensor, decoded: Tensor) -> None:
        self._compress(tensor, payload, decoded)

    def _compress(self, tensor: Tensor, payload: Tensor, decoded: Tensor | None) -> None:
        check_call(self, tensor, payload)
        corrected = self._corrected(tensor.detach())
        self.inner.compress_to_loss(corrected, payload, decoded)
        self._residual = corrected

    def encode(self, tensor: Tensor) -> Tensor:
        corrected = self._corrected(tensor.detach())
        payload = self.inner.encode(corrected)
        self.inner.decompress_subtract(payload, corrected)
        self._residual = corrected.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return payload

    def _corrected(self, tensor: Tensor) -> Tensor:
        """`tensor` and what was lost before, in the memory of the residual unless that is lent."""
        if self._residual is None:
            return tensor.clone()
        residual = self._residual_for(tensor)
        out = torch.empty_like(residual) if self._is_lent else residual
        self._is_lent = False
        return torch.add(tensor, residual, alpha=self.decay, out=out)

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        self.inner.decompress(payload, out)

    def decompress_add(self, payload: Tensor, out: Tensor) -> None:
        self.inner.decompress_add(payload, out)

    def decompress_subtract(self, payload: Tensor, out: Tensor) -> None:
        self.inner.decompress_subtract(payload, out)

    def for_bucket(self) -> Self:
        return type(self)(self.inner.for_bucket(), decay=self.decay)

    @property
    def residual(self) -> Tensor | None:
        return self._residual

    def lend_residual(self) -> Tensor | None:
        self._is_lent = True
        return self._residual

    def set_residual(self, residual: Tensor | None) -> None:
        if residual is not None and residual.is_cuda:  # of another stream, perhaps, and dropped before it is copied
            residual.record_stream(torch.cuda.current_stream(residual.device))
        self._residual = None if residual is None else residual.clone()

    def state_dict(self) -> dict[str, Any]:
        residual = None if self._residual is None else self._residual.clone()
        return {"residual": residual, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.set_residual(state["residual"])
        self.inner.load_state_dict(state["inner"])

    def _residual_for(self, tensor: Tensor) -> Tensor:
        """The residual, on the tensor's device; a UsageError if it belongs to other tensors."""
        assert self._residual is not None
        if (self._residual.shape, self._residual.dtype) != (tensor.shape, tensor.dtype):
            raise UsageError(
                f"this ErrorFeedback holds what {self._residual.numel()} x {self._residual.dtype} lost, but was given "
                f"{tensor.numel()} x {tensor.dtype}. Keep one for each tensor that is sent: for_bucket() makes one."
            )
        return self._residual.to(tensor.device)
