"""The memory of a bucket: the gradients of its parameters side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class Bucket:
    """Gradients that are exchanged together, in `flat`.

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
        self.numels = [parameter.numel() for parameter in parameters]
        self.flat = allocate(sum(self.numels), parameters[0].dtype, parameters[0].device)
        self.views = self.views_of(self.flat)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """`flat`, a tensor as long as the bucket's own, cut by parameter, with the parameters' shapes and strides."""
        return [_view_like(*each) for each in zip(torch.split(flat, self.numels), self.parameters, strict=True)]

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
