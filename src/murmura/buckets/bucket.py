"""A bucket: the gradients of its parameters side by side, and how a gradient is copied into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from murmura.errors import UsageError


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
        self.gpu = self.flat.get_device() if self.flat.is_cuda else None  # its number
        self._form = self.flat.dtype, self.flat.device
        self._shapes = [view.shape for view in self.views]
        self._places = [view.data_ptr() for view in self.views]

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """`flat`, a tensor as long as the bucket's own, cut by parameter, with the parameters' shapes and strides."""
        return [_view_like(*each) for each in zip(torch.split(flat, self.numels), self.parameters, strict=True)]

    def copy_in(self, gradients: Mapping[int, Tensor], *, as_views: bool = True) -> bool:
        """Copy gradients, by the slot of their parameter, into the bucket; make `.grad` a view of it if `as_views`.

        On a GPU one kernel copies many. A gradient with a graph of its own stays where it is; whether there is one is
        returned.
        """
        if self.gpu is not None and gradients:
            plain = [each.detach() if each.requires_grad else each for each in gradients.values()]
            torch._foreach_copy_([self.views[slot] for slot in gradients], plain)
        has_graphs = False
        for slot, gradient in gradients.items():
            parameter = self.parameters[slot]
            if self.gpu is None:
                self.views[slot].copy_(gradient.detach())
            if gradient.requires_grad:
                has_graphs = True
            elif as_views and parameter.grad is gradient:
                parameter.grad = self.views[slot]
        return has_graphs

    def gradient_outside(self, slot: int) -> Tensor | None:
        """The gradient of `parameters[slot]`, unless it is in the bucket already; `UsageError` if it is of no use."""
        gradient, view, place = self.parameters[slot].grad, self.views[slot], self._places[slot]
        if gradient is view:
            if view.data_ptr() == place:
                return None
            view = self.views[slot] = self.views_of(self.flat)[slot]  # `grad.data = ...` took it out of the bucket
        if gradient is None:  # on a GPU it is taken when the bucket is full, and not when it comes
            raise UsageError(
                f"the gradient of {self.names[slot]!r} was removed before it was sent, while backward was running. "
                "Change a gradient in a hook of its own parameter (register_post_accumulate_grad_hook), or after "
                "backward()."
            )
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self.names[slot]!r} is sparse, which DDP does not exchange. "
                "Build the embedding with sparse=False, or name the parameter in DDP(ignore=...)."
            )
        if gradient.data_ptr() == place and gradient.stride() == view.stride():
            return None
        if (gradient.dtype, gradient.device) != self._form or gradient.shape != self._shapes[slot]:
            raise UsageError(
                f"the gradient of {self.names[slot]!r} no longer fits its bucket: the parameter was cast, moved "
                "or resized after wrapping. Do that before, or wrap the model again: DDP(ddp.into_inner(), ...)."
            )
        return gradient

    def holds(self, slot: int) -> bool:
        """Whether the gradient of `parameters[slot]` is its view, which still lies in `flat`."""
        view = self.views[slot]
        return self.parameters[slot].grad is view and view.data_ptr() == self._places[slot]

    def holds_all(self) -> bool:
        """Whether it holds the gradients of all its parameters."""
        are_views = all(parameter.grad is view for parameter, view in zip(self.parameters, self.views, strict=True))
        return are_views and [view.data_ptr() for view in self.views] == self._places

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
