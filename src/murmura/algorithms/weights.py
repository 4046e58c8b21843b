"""Tensors side by side, and the weights of a replica so: what algorithms that exchange more than gradients work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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

    def __init__(self, replica: Replica, *, with_frozen: bool = False, also: Sequence[str] = ()) -> None:
        self._replica = replica
        chosen = {
            name: parameter
            for name, parameter in zip(replica.names, replica.parameters, strict=True)
            if parameter.requires_grad or with_frozen or name in also
        }
        self._names = list(chosen)
        self._parameters: list[Tensor] = list(chosen.values())
        super().__init__(self._tensors())

    def extended(self) -> FlatWeights:
        """The same with the parameters that have become trainable since."""
        return FlatWeights(self._replica, also=self._names)

    @property
    def num_parameter_elements(self) -> list[int]:
        """How many elements of each flat are parameters; the buffers come behind them."""
        count = len(self._parameters)
        return [sum(self._parameters[each].numel() for each in kind.members if each < count) for kind in self._kinds]

    @property
    def parameters_of(self) -> list[list[str]]:
        """The names of the parameters in each flat, in their order there."""
        count = len(self._parameters)
        return [[self._names[each] for each in kind.members if each < count] for kind in self._kinds]

    def by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """A copy of each parameter's and buffer's part of `flats`."""
        return {name: part.clone() for name, part in self._parts(flats).items()}

    def load_by_name(self, flats: Sequence[Tensor], saved: Mapping[str, Tensor]) -> None:
        """Overwrite the parts of `flats` that `saved` names; the others stay as they are."""
        parts = self._parts(flats)
        known = {*self._replica.names, *self._replica.buffer_names}
        for name, value in saved.items():
            if name not in known or (name in parts and parts[name].numel() != value.numel()):
                raise ConfigError(
                    f"this state holds {value.numel()} elements of {name!r}, which the model here does not have: it "
                    "was saved for another model."
                )
            if name in parts:
                parts[name].copy_(value)

    def _parts(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        buffers = [
            name
            for name, each in zip(self._replica.buffer_names, self._replica.buffers, strict=False)
            if _has_mean(each)
        ]
        names, tensors = [*self._names, *buffers], self._tensors()
        parts: dict[str, Tensor] = {}
        for flat, kind in zip(flats, self._kinds, strict=True):
            cut = torch.split(flat, [tensors[each].numel() for each in kind.members])
            parts |= {names[each]: part for each, part in zip(kind.members, cut, strict=True)}
        return parts

    def _tensors(self) -> list[Tensor]:
        # A module may put another tensor in the place of a buffer, so these are looked up each time.
        return [*self._parameters, *(each for each in self._replica.buffers if _has_mean(each))]


def as_real(flat: Tensor) -> Tensor:
    """`flat` itself, or the parts of complex numbers as a flat of twice the length: what compressors take."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
