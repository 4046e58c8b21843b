"""Tensors side by side in flat ones, so that many of them are exchanged as one: a flat for each dtype and device."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from murmura.errors import UsageError

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes a flat tensor of so many elements: `Transport.allocate`, say, or `plain_memory`."""


class Group(NamedTuple):
    """The tensors that share a flat."""

    dtype: torch.dtype
    device: torch.device
    members: list[int]  # indices into the list of tensors
    numel: int


class FlatTensors:
    """Copies `tensors` into flats and back; the tensors stay where they are.

    Those of one dtype and device share a flat, in the order of the list. `keys`, one for each tensor, group them
    otherwise: where ranks name their devices differently, equal keys give equal groups.
    """

    def __init__(self, tensors: Sequence[Tensor], keys: Sequence[Hashable] | None = None) -> None:
        self._given = tensors
        self._forms = [(each.dtype, each.shape) for each in tensors]
        by_key: dict[Hashable, list[int]] = {}
        for index, key in enumerate([(each.dtype, each.device) for each in tensors] if keys is None else keys):
            by_key.setdefault(key, []).append(index)
        self.groups = [
            Group(
                tensors[members[0]].dtype, tensors[members[0]].device, members, sum(tensors[i].numel() for i in members)
            )
            for members in by_key.values()
        ]

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that it was made of, of the same form as then."""
        same = len(tensors) == len(self._given) and all(map(operator.is_, tensors, self._given))
        return same and [(each.dtype, each.shape) for each in tensors] == self._forms

    @property
    def numels(self) -> list[int]:
        """The lengths of the flats."""
        return [group.numel for group in self.groups]

    def allocate(self, allocate: Allocate) -> list[Tensor]:
        """New flats that hold the tensors' values, in memory of `allocate`; that of a transport travels fastest."""
        flats = [allocate(group.numel, group.dtype, group.device) for group in self.groups]
        self.read(flats)
        return flats

    @torch.no_grad()
    def read(self, flats: Sequence[Tensor]) -> None:
        """Overwrite `flats` with the tensors."""
        self._check(flats)
        tensors = self._tensors()
        if all(tensor.is_contiguous() for tensor in tensors):  # otherwise reshape would copy
            for flat, group in zip(flats, self.groups, strict=True):
                torch.cat([tensors[index].reshape(-1) for index in group.members], out=flat)
        else:
            for part, tensor in self.pairs(flats):
                part.copy_(tensor)

    @torch.no_grad()
    def write(self, flats: Sequence[Tensor]) -> None:
        """Overwrite the tensors, in place, with `flats`."""
        pairs = self.pairs(flats)
        if pairs and all(tensor.is_cuda for _, tensor in pairs):  # one kernel for many
            torch._foreach_copy_([tensor for _, tensor in pairs], [part for part, _ in pairs])
            return
        for part, tensor in pairs:
            tensor.copy_(part)

    @torch.no_grad()
    def add(self, flats: Sequence[Tensor]) -> None:
        """Add `flats` to the tensors, in place."""
        for part, tensor in self.pairs(flats):
            tensor.add_(part)

    def parts(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Views of `flats`, one for each tensor, in the order and with the shapes of the tensors."""
        return [part for part, _ in self.pairs(flats)]

    def pairs(self, flats: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Each tensor behind its part of `flats`, in the order of the list."""
        self._check(flats)
        tensors = self._tensors()
        parts: dict[int, Tensor] = {}
        for flat, group in zip(flats, self.groups, strict=True):
            cut = torch.split(flat, [tensors[index].numel() for index in group.members])
            parts |= zip(group.members, cut, strict=True)
        return [(parts[index].view(tensor.shape), tensor) for index, tensor in enumerate(tensors)]

    def _check(self, flats: Sequence[Tensor]) -> None:
        if not isinstance(flats, list | tuple) or not all(isinstance(flat, Tensor) for flat in flats):
            raise UsageError(f"flats={flats!r}: give a list of tensors.")
        if [flat.shape for flat in flats] != [(numel,) for numel in self.numels]:
            shapes = [list(flat.shape) for flat in flats]
            raise UsageError(f"flats of shapes {shapes}: give a list of flat tensors with {self.numels} elements.")

    def _tensors(self) -> Sequence[Tensor]:
        return self._given


def plain_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat in torch's own memory, for what is exchanged rarely."""
    return torch.empty(numel, dtype=dtype, device=device)
