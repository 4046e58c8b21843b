"""Tensors of one kind, sent as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from murmura.transports.base import Transport


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


@torch.no_grad()
def broadcast_together(transport: Transport, tensors: Sequence[Tensor], src: int, *, rarely: bool = False) -> None:
    """Overwrite `tensors` with those of rank `src`, in place, with one broadcast for each dtype and device.

    What is sent `rarely` goes through memory that is given back afterwards: slower than a staging area, but that the
    transport would keep.
    """
    for group in _by_kind(tensors):
        numel = sum(tensor.numel() for tensor in group)
        memory = transport.allocate(numel, group[0].dtype, group[0].device) if rarely else None
        flat = torch.cat([tensor.reshape(-1) for tensor in group], out=memory)
        transport.broadcast(flat, src)
        for tensor, part in zip(group, torch.split(flat, [tensor.numel() for tensor in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def average_together(transport: Transport, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The mean over the ranks of each of `tensors`, as new tensors; those that have no mean are copied."""
    means: dict[int, Tensor] = {}
    for group in _by_kind(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        if flat.is_floating_point() or flat.is_complex():
            transport.all_reduce(flat, "mean")
        for tensor, part in zip(group, torch.split(flat, [tensor.numel() for tensor in group]), strict=True):
            means[id(tensor)] = part.view(tensor.shape)
    return [means[id(tensor)] for tensor in tensors]
