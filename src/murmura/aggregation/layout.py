"""The layout of a list of tensors, which all ranks must agree on, and the flat buffers that the list is packed into.

Devices are numbered in the order in which they occur in the list, because their names differ from rank to rank (cuda:0
here is cuda:1 there).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from murmura.agreement import first_difference, texts_if_different
from murmura.buckets.flat import FlatTensors
from murmura.errors import mismatch
from murmura.transports.base import Transport
from murmura.transports.checks import describe


class Slot(NamedTuple):
    """Dtype, shape and device of one tensor of a list; a list of slots is a layout."""

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


def to_json(layout: Sequence[Slot]) -> str:
    return json.dumps(layout)


def from_json(text: str) -> list[Slot]:
    return [Slot(dtype, tuple(shape), kind, number) for dtype, shape, kind, number in json.loads(text)]


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def check_same_layout(transport: Transport, call: str, layout: Sequence[Slot], *, abstains: bool = False) -> None:
    """Raise `CollectiveMismatch` on every rank, and abort the transport, if the ranks hold different layouts.

    A rank that `abstains` takes part and goes by the others' layout.
    """
    texts = texts_if_different(transport, [call, *map(str, layout)], abstains=abstains)
    if texts is None:
        return
    differing = first_difference([text for text in texts if text], start=1)
    lines = [_in_a_line(text, differing) if text else "an empty list, which suits any" for text in texts]
    ranks = transport.world_ranks
    error = mismatch(ranks[transport.rank], call, dict(zip(ranks, lines, strict=True)))
    transport.abort(error)
    raise error


def _in_a_line(text: Sequence[str], differing: int | None) -> str:
    """A rank's call, its number of tensors, and the first tensor that is not the same everywhere."""
    line = f"{text[0]} of {len(text) - 1} tensor{'s' * (len(text) != 2)}"
    if differing is not None:
        at = differing - 1
        line += f"; [{at}] is {text[differing]}" if differing < len(text) else f"; there is no [{at}]"
    return line


def _keys(layout: Sequence[Slot]) -> list[tuple[str, int]]:
    """The keys by which tensors are grouped: equal layouts give equal groups on every rank."""
    return [(slot.dtype, slot.device_number) for slot in layout]


class FlatBuffers:
    """The flat buffers of one aggregator, in its transport's memory: a group's is kept until a longer one is needed."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._kept: dict[tuple[torch.dtype, torch.device, int], Tensor] = {}

    def pack(self, tensors: Sequence[Tensor], layout: Sequence[Slot]) -> list[Tensor]:
        """A flat copy of each group, valid until the next call."""
        packing = FlatTensors(tensors, _keys(layout))
        flats = [
            self._take(group.numel, group.dtype, group.device, layout[group.members[0]].device_number)
            for group in packing.groups
        ]
        packing.read(flats)
        return flats

    def _take(self, numel: int, dtype: torch.dtype, device: torch.device, device_number: int) -> Tensor:
        key = dtype, device, device_number
        kept = self._kept.get(key)
        if kept is None or kept.numel() < numel:
            kept = self._kept[key] = self._transport.allocate(numel, dtype, device)
        return kept[:numel]


def unpack(flats: Sequence[Tensor], likes: Sequence[Tensor], layout: Sequence[Slot]) -> list[Tensor]:
    """New tensors of the shapes, strides and devices of `likes`, filled from the flat buffers."""
    filled = [torch.empty_like(like) for like in likes]
    FlatTensors(filled, _keys(layout)).write(flats)
    return filled
