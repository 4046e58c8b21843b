"""One bit per element: its sign, with the mean magnitude of each block beside it (EF-signSGD, arXiv 1901.09847)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from murmura.compressors.base import Compressor, check_call, check_encodable, working_dtype
from murmura.compressors.minmax_plain import sections
from murmura.compressors.names import register_compressor
from murmura.errors import ConfigError


@register_compressor("sign", feedback=True)
@register_compressor("majority_vote", scaled=False)
@dataclass(frozen=True)
class Sign(Compressor):
    """Sends an element as +s or -s, where s is the mean magnitude of its block; zero counts as positive.

    Without `scaled`, s is 1: then the mean over ranks, encoded again, is the majority vote of signSGD (arXiv
    1810.05291). A block of zeros decodes to zeros: a rank that has run out of data does not vote. A tie counts as
    positive, but a block in which all elements tie is one of zeros. A block that holds an infinity or a NaN decodes to
    NaN. `block_size` is in elements, a multiple of 8.
    """

    block_size: int = 4096
    scaled: bool = True

    def __post_init__(self) -> None:
        size = self.block_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 8 or size % 8:
            raise ConfigError(f"block_size={size!r} is no multiple of 8 elements. Give 8 or more; 4096 is usual.")
        if not isinstance(self.scaled, bool):
            raise ConfigError(f"scaled={self.scaled!r} must be True or False.")

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        check_encodable(dtype)
        return -(-numel // 8) + working_dtype(dtype).itemsize * -(-numel // self.block_size)

    @property
    def grain(self) -> int:
        return self.block_size

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        check_call(self, tensor, payload)
        values = tensor.detach()
        num_bytes = -(-values.numel() // 8)
        bits = torch.zeros(8 * num_bytes, dtype=torch.uint8, device=values.device)
        bits[: values.numel()] = values >= 0
        torch.sum(bits.view(-1, 8) << _places(values), 1, dtype=torch.uint8, out=payload[:num_bytes])
        payload[num_bytes:].copy_(self._scales(values).view(torch.uint8))

    def _scales(self, values: Tensor) -> Tensor:
        """s of each block."""
        dtype = working_dtype(values.dtype)
        means = [rows.to(dtype).abs().mean(1) for rows in sections(values, self._block(values))]
        scales = torch.cat([torch.zeros(0, dtype=dtype, device=values.device), *means])
        return torch.where(scales.isfinite(), scales if self.scaled else scales.sign(), torch.nan).to(dtype)

    def _block(self, values: Tensor) -> int:
        """The length of the blocks of `values`, which is no number beyond what torch can count to."""
        return max(1, min(values.numel(), self.block_size))

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        check_call(self, out, payload)
        out.detach().copy_(self._decoded(payload, out))

    def decompress_add(self, payload: Tensor, out: Tensor) -> None:
        check_call(self, out, payload)
        out.detach().add_(self._decoded(payload, out).to(out.dtype))

    def _decoded(self, payload: Tensor, out: Tensor) -> Tensor:
        num_bytes = -(-out.numel() // 8)
        bits = (payload[:num_bytes].view(-1, 1) >> _places(out)) & 1
        scales = payload[num_bytes:].clone().view(working_dtype(out.dtype))
        signs = bits.view(-1)[: out.numel()].to(scales.dtype).mul_(2).sub_(1)
        return signs.mul_(scales.repeat_interleave(self._block(out))[: out.numel()])


def _places(like: Tensor) -> Tensor:
    """How far to shift the bits of a byte."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)
