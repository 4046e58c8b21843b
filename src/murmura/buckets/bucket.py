"""The memory of a bucket: the gradients of its parameters side by side, and a tail that settles differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Tail(NamedTuple):
    """What travels behind the gradients, as the mean over the ranks."""

    used: list[float]  # share of the ranks on which each parameter got a gradient
    weight: float  # mean of the ranks' data weights
    fingerprint: float


class Bucket:
    """Gradients that travel together. `flat` is the whole: `gradients`, then `tail`.

    `views[i]` is where the gradient of `parameters[i]` lies, with the parameter's own strides.
    """

    def __init__(
        self,
        index: int,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        allocate: Callable[[int, torch.dtype, torch.device], Tensor],
    ) -> None:
        self.index = index
        self.names = list(names)
        self.parameters = list(parameters)
        self.numel = sum(parameter.numel() for parameter in parameters)
        self.flat = allocate(self.numel + len(parameters) + 2, parameters[0].dtype, parameters[0].device)
        self.gradients = self.flat[: self.numel]
        self.tail = self.flat[self.numel :]
        self.views: list[Tensor] = []
        start = 0
        for parameter in parameters:
            self.views.append(_view_like(self.flat[start : start + parameter.numel()], parameter))
            start += parameter.numel()

    def write_tail(self, used: Sequence[bool], weight: float, fingerprint: float) -> None:
        """Say what this rank brings; the algorithm's mean of `flat` carries it to the others."""
        self.tail.copy_(torch.tensor([*map(float, used), weight, fingerprint], dtype=torch.float64))

    def read_tail(self) -> Tail:
        """What all ranks brought; waits for the device."""
        *used, weight, fingerprint = (self.tail.real if self.tail.is_complex() else self.tail).tolist()
        return Tail(used, weight, fingerprint)

    def __repr__(self) -> str:
        return (
            f"Bucket({self.index}, {len(self.parameters)} parameters from {self.names[0]!r}, {self.flat.nbytes} bytes)"
        )


def _view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """`flat` with the shape and, where they fill it without gaps, the strides of `parameter`."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return flat.view(parameter.shape)
            expected *= size
    return flat.as_strided(parameter.shape, parameter.stride())
