"""Lists of tensors as flat buffers, and what must be known of a list to do so.

Tensors of one dtype on one device form a *group* and travel in one flat buffer. Devices are numbered in the order
in which a list comes to them, for their names differ from rank to rank (cuda:0 here is cuda:1 there).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from murmura.transports.base import Transport
from murmura.transports.checks import describe


class Slot(NamedTuple):
    """What one tensor of a list is; a list of them is a layout."""

    dtype: str
    shape: tuple[int, ...]
    device_kind: str
    device_number: int

    def __str__(self) -> str:
        where = f" on a device numbered {self.device_number}" if self.device_number else ""
        return f"{self.dtype}{list(self.shape)}{where}"

    def empty(self) -> Tensor:
        """A tensor to be filled, on this process's device of that kind, or on the CPU if it has none."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        is_here = torch.get_device_module(self.device_kind).is_available()
        return torch.empty(self.shape, dtype=dtype, device=self.device_kind if is_here else "cpu")


def layout_of(tensors: Sequence[Tensor]) -> list[Slot]:
    numbers: dict[torch.device, int] = {}
    return [
        Slot(
            describe(tensor).partition("[")[0],
            tuple(tensor.shape),
            tensor.device.type,
            numbers.setdefault(tensor.device, len(numbers)),
        )
        for tensor in tensors
    ]


def to_bytes(text: str, device: torch.device) -> Tensor:
    """`text` as it is sent: a uint8 tensor on `device`."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)


def from_bytes(data: Tensor) -> str:
    return bytes(data.tolist()).decode()


def to_json(layout: Sequence[Slot]) -> str:
    return json.dumps(layout)


def from_json(text: str) -> list[Slot]:
    return [Slot(dtype, tuple(shape), kind, number) for dtype, shape, kind, number in json.loads(text)]


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def groups_of(layout: Sequence[Slot]) -> list[list[int]]:
    """The indices of each group's tensors; equal layouts give equal groups on every rank."""
    groups: dict[tuple[str, int], list[int]] = {}
    for index, slot in enumerate(layout):
        groups.setdefault((slot.dtype, slot.device_number), []).append(index)
    return list(groups.values())


class FlatBuffers:
    """The flat buffers of one aggregator, in its transport's memory: a group's is kept until a longer one is needed."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._kept: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}

    def pack(self, tensors: Sequence[Tensor], layout: Sequence[Slot]) -> list[Tensor]:
        """A flat copy of each group, good until the next call."""
        flats = []
        for indices in groups_of(layout):
            first = tensors[indices[0]]
            numel = sum(tensors[index].numel() for index in indices)
            flat = self._take(numel, first.dtype, first.device, layout[indices[0]].device_number)
            for index, part in zip(indices, parts_of(flat, tensors, indices), strict=True):
                part.copy_(tensors[index].detach())
            flats.append(flat)
        return flats

    def _take(self, numel: int, dtype: torch.dtype, device: torch.device, device_number: int) -> Tensor:
        key = dtype, device, device_number
        kept = self._kept.get(key)
        if kept is None or kept.numel() < numel:
            kept = self._kept[key] = self._transport.allocate(numel, dtype, device)
        return kept[:numel]


def parts_of(flat: Tensor, tensors: Sequence[Tensor], indices: Sequence[int]) -> list[Tensor]:
    """Views of `flat`, each with the shape of its tensor."""
    parts = torch.split(flat, [tensors[index].numel() for index in indices])
    return [part.view(tensors[index].shape) for index, part in zip(indices, parts, strict=True)]


def unpack(flats: Sequence[Tensor], likes: Sequence[Tensor], layout: Sequence[Slot]) -> list[Tensor]:
    """New tensors of the shapes, strides and devices of `likes`, filled from the flat buffers."""
    filled = [torch.empty_like(like) for like in likes]
    for flat, indices in zip(flats, groups_of(layout), strict=True):
        for index, part in zip(indices, parts_of(flat, likes, indices), strict=True):
            filled[index].copy_(part)
    return filled
