"""The contract of a compressor: pure tensor code that turns values into fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from murmura.errors import UsageError

ENCODABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PIECE_ELEMENTS = 2**19  # what one core takes at a time, to find it in its cache again


class Compressor(ABC):
    """Encodes a flat tensor into a uint8 payload and back.

    The size of a payload depends on the length and dtype alone, unless `is_uneven`: no length prefix travels, and
    buffers are reused. The same payload decodes to the same bits on every rank and every device, into a tensor of the
    dtype it was made of, or of float32 instead of a half type. Tensors and payloads are flat and contiguous; a payload
    may begin at any byte of a larger buffer.
    """

    @property
    def gathers(self) -> bool:
        """Whether every rank receives the payloads of all ranks and averages them itself.

        That suits sparse values, whose mean is less sparse. Otherwise each rank decodes and averages one chunk of the
        values for all and encodes the mean again, so that what it sends does not grow with the number of ranks.
        """
        return False

    @property
    def is_uneven(self) -> bool:
        """Whether the length of what `encode` returns depends on the values; only where it `gathers`."""
        return False

    @abstractmethod
    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The exact number of bytes that `numel` elements of `dtype` take, or the most if it `is_uneven`."""

    @abstractmethod
    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        """Fill `payload` from `tensor`, which is only read."""

    def compress_decoding(self, tensor: Tensor, payload: Tensor, decoded: Tensor) -> None:
        """Fill `payload` from `tensor`, and `decoded`, which may be `tensor` itself, with what the payload holds."""
        self.compress(tensor, payload)
        self.decompress(payload, decoded)

    def compress_to_loss(self, tensor: Tensor, payload: Tensor, decoded: Tensor | None = None) -> None:
        """Fill `payload` from `tensor`, which becomes what is lost of it, zero where that is not finite.

        `decoded` gets what the payload holds.
        """
        self.compress(tensor, payload)
        if decoded is None:
            self.decompress_subtract(payload, tensor)
        else:
            self.decompress(payload, decoded)
            tensor.sub_(decoded)
        tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    @abstractmethod
    def decompress(self, payload: Tensor, out: Tensor) -> None:
        """Overwrite `out` from `payload`, which is only read."""

    def decompress_add(self, payload: Tensor, out: Tensor) -> None:
        """Add what `payload` holds to `out`: to the bit what `decompress` and `out.add_` give."""
        decoded = torch.empty_like(out)
        self.decompress(payload, decoded)
        out.add_(decoded)

    def decompress_subtract(self, payload: Tensor, out: Tensor) -> None:
        """Subtract what `payload` holds from `out`: to the bit what `decompress` and `out.sub_` give."""
        decoded = torch.empty_like(out)
        self.decompress(payload, decoded)
        out.sub_(decoded)

    def encode(self, tensor: Tensor) -> Tensor:
        """A new payload of `tensor`, which is only read; one that `is_uneven` may return fewer bytes than it could."""
        payload = torch.empty(self.payload_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8, device=tensor.device)
        self.compress(tensor, payload)
        return payload

    # Many payloads at once: a GPU launches one kernel where there were one or two for each

    def compress_parts(self, tensor: Tensor, num_parts: int, payload: Tensor) -> None:
        """Fill `payload` with those of the parts that `Tensor.tensor_split` cuts `tensor` into, end to end."""
        for part, its_payload in _parts(self, tensor, num_parts, payload):
            self.compress(part, its_payload)

    def decompress_parts(self, payload: Tensor, num_parts: int, out: Tensor) -> None:
        """Overwrite `out` from what `compress_parts` has filled."""
        for part, its_payload in _parts(self, out, num_parts, payload):
            self.decompress(its_payload, part)

    def compress_mean(self, payloads: Tensor, divisor: int, mean: Tensor, out: Tensor) -> None:
        """Fill `out` with the payload of what the rows of `payloads` hold, summed in their order and divided.

        `mean` is room to compute it in, of the dtype to compute in; its contents are undefined afterwards.
        """
        for row, payload in enumerate(payloads):
            if row == 0:
                self.decompress(payload, mean)
            else:
                self.decompress_add(payload, mean)
        mean.div_(divisor)
        self.compress(mean, out)

    @property
    def grain(self) -> int | None:
        """A tensor may be cut at multiples of this many elements: the pieces take as many bytes as the whole, and
        decode to its bits. None if it may not be cut."""
        return None

    def for_bucket(self) -> Self:
        """The compressor of one bucket of one model; one that carries state returns a fresh object."""
        return self

    @property
    def residual(self) -> Tensor | None:
        """What compression lost of each element so far; None if nothing is kept.

        The next tensor may overwrite it: see `lend_residual`.
        """
        return None

    def lend_residual(self) -> Tensor | None:
        """The residual, for a caller that holds on to it: the next tensor's residual then gets memory of its own."""
        return self.residual

    def set_residual(self, residual: Tensor | None) -> None:  # noqa: B027  # most keep none
        """Take `residual` over, where elements have moved to other tensors."""

    def state_dict(self) -> dict[str, Any]:
        """What must travel in a checkpoint for a run to continue bit for bit."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027  # most carry no state
        """Take over what `state_dict` returned."""


def _parts(compressor: Compressor, tensor: Tensor, num_parts: int, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of `tensor`, each with its part of `payload`."""
    parts = tensor.tensor_split(num_parts)
    sizes = [compressor.payload_bytes(part.numel(), part.dtype) for part in parts]
    return zip(parts, torch.split(payload, sizes), strict=True)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of `dtype` are computed in, and where that is needed sent in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_encodable(dtype: torch.dtype) -> None:
    """Raise a UsageError unless values of `dtype` can be compressed."""
    if dtype not in ENCODABLE:
        known = ", ".join(str(each) for each in ENCODABLE)
        raise UsageError(
            f"{dtype} values cannot be compressed; convert them to one of {known}, or send them as they are."
        )


def check_call(compressor: Compressor, values: Tensor, payload: Tensor) -> None:
    """Raise a UsageError unless `payload` is one for `values`."""
    if values.dim() != 1 or not values.is_contiguous() or payload.dim() != 1 or not payload.is_contiguous():
        raise UsageError(
            f"values of shape {list(values.shape)} and a payload of shape {list(payload.shape)}: a compressor takes "
            "flat contiguous tensors. Pass tensor.view(-1), or tensor.reshape(-1) where a copy will do."
        )
    if payload.device != values.device:
        raise UsageError(f"the values are on {values.device} but the payload on {payload.device}; move one of them.")
    size = compressor.payload_bytes(values.numel(), values.dtype)
    if payload.dtype != torch.uint8 or payload.numel() != size:
        raise UsageError(
            f"the payload is {payload.numel()} x {payload.dtype}, but {values.numel()} x {values.dtype} take {size} "
            f"bytes in {compressor!r}. Make it with torch.empty(payload_bytes(numel, dtype), dtype=torch.uint8)."
        )
