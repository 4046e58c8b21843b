"""Tensors side by side, and the weights of a replica so: what algorithms that exchange more than gradients work on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from murmura.algorithms.base import Replica
from murmura.errors import ConfigError
from murmura.transports.base import Transport


class _Kind(NamedTuple):
    """The tensors of one dtype and device."""

    dtype: torch.dtype
    device: torch.device
    members: list[int]  # indices into the list of tensors
    numel: int


class FlatTensors:
    """Moves `tensors` into flat ones and back; one flat for each dtype and device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._given = tensors
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(index)
        self._kinds = [
            _Kind(dtype, device, members, sum(tensors[each].numel() for each in members))
            for (dtype, device), members in by_kind.items()
        ]

    @property
    def numels(self) -> list[int]:
        """The lengths of the flats."""
        return [kind.numel for kind in self._kinds]

    def allocate(self, transport: Transport) -> list[Tensor]:
        """Flats filled with the tensors as they are, in memory on which `transport` need not copy."""
        flats = [transport.allocate(kind.numel, kind.dtype, kind.device) for kind in self._kinds]
        self.read(flats)
        return flats

    @torch.no_grad()
    def read(self, flats: Sequence[Tensor]) -> None:
        """Overwrite `flats` with the tensors."""
        for part, tensor in self.pairs(flats):
            part.copy_(tensor)

    @torch.no_grad()
    def write(self, flats: Sequence[Tensor]) -> None:
        """Overwrite the tensors, in place, with `flats`."""
        for part, tensor in self.pairs(flats):
            tensor.copy_(part)

    @torch.no_grad()
    def add(self, flats: Sequence[Tensor]) -> None:
        """Add `flats` to the tensors, in place."""
        for part, tensor in self.pairs(flats):
            tensor.add_(part)

    def pairs(self, flats: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each tensor behind its part of `flats`."""
        tensors = self._tensors()
        pairs = []
        for flat, kind in zip(flats, self._kinds, strict=True):
            members = [tensors[each] for each in kind.members]
            parts = torch.split(flat, [tensor.numel() for tensor in members])
            pairs += [(part.view(tensor.shape), tensor) for part, tensor in zip(parts, members, strict=True)]
        return pairs

    def _tensors(self) -> Sequence[Tensor]:
        return self._given


class FlatWeights(FlatTensors):
    """Moves the weights of `replica` into flat tensors and back.

    The weights are the parameters that were trainable when this was made, or all, and the buffers that have a mean. The
    replica's own tensors stay where they are.
    """

    def __init__(self, replica: Replica, *, with_frozen: bool = False) -> None:
        self._replica = replica
        self._parameters: list[Tensor] = [p for p in replica.parameters if p.requires_grad or with_frozen]
        super().__init__(self._tensors())

    @property
    def num_parameter_elements(self) -> list[int]:
        """How many elements of each flat are parameters; the buffers come behind them."""
        count = len(self._parameters)
        return [sum(self._parameters[each].numel() for each in kind.members if each < count) for kind in self._kinds]

    @torch.no_grad()
    def renew(self, flats: Sequence[Tensor]) -> None:
        """Overwrite the parameters with `flats`, but add to the buffers what stands there for them, in place."""
        for part, weight in self.pairs(flats):
            if isinstance(weight, nn.Parameter):
                weight.copy_(part)
            else:
                weight.add_(part)

    def _tensors(self) -> list[Tensor]:
        # A module may put another tensor in the place of a buffer, so these are looked up each time.
        return [*self._parameters, *(each for each in self._replica.buffers if _has_mean(each))]


def as_real(flat: Tensor) -> Tensor:
    """`flat` itself, or the parts of complex numbers as a flat of twice the length: what compressors take."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def check_same_lengths(saved: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """Refuse to load flats of another model."""
    if [each.numel() for each in saved] != [each.numel() for each in own]:
        raise ConfigError(
            f"this state holds flats of {[each.numel() for each in saved]} elements, and the model here makes "
            f"{[each.numel() for each in own]}: it was saved for another model, or with other parameters trainable."
        )
