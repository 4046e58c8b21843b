"""A contestant must compute what it claims to: first gradients equal those of the bare module, replicas end equal."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from murmura import MurmuraError, Transport
from murmura.tools.bench.models import Batch, Model

TOLERANCE = 1e-4  # of the largest element of a gradient: sums in another order, nothing more


def expected_gradients(
    transport: Transport, recipe: Model, module: nn.Module, batch: Batch
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of `module` on this rank's `batch`, and their mean over the ranks; `module` stays as it is."""
    module = copy.deepcopy(module)
    inputs, targets = batch
    parameters = list(module.parameters())
    local = list(torch.autograd.grad(recipe.loss(module(inputs), targets), parameters))
    flat = torch.cat([gradient.flatten().double() for gradient in local])
    transport.all_reduce(flat, "mean")
    parts = torch.split(flat.to(local[0].dtype), [gradient.numel() for gradient in local])
    return local, [part.view_as(gradient) for part, gradient in zip(parts, local, strict=True)]


def check_gradients(module: nn.Module, expected: list[Tensor], name: str) -> None:
    """Raise a `MurmuraError` unless the gradients of `module` are the `expected` ones."""
    for (parameter_name, parameter), right in zip(module.named_parameters(), expected, strict=True):
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        error, largest = float((found - right).abs().max()), float(right.abs().max())
        if not error <= TOLERANCE * largest:
            raise MurmuraError(
                f"{name} has wrong gradients: that of {parameter_name!r} is off by {error:.3g} in its first step, and "
                f"its largest element should be {largest:.3g}. There is nothing to measure."
            )


def check_in_step(transport: Transport, module: nn.Module, name: str) -> None:
    """Raise a `MurmuraError` unless the parameters of `module` have the same sums on all ranks."""
    sums = torch.stack([parameter.detach().double().sum() for parameter in module.parameters()])
    least, most = sums.clone(), sums.clone()
    transport.all_reduce(least, "min")
    transport.all_reduce(most, "max")
    if not torch.equal(least, most):
        raise MurmuraError(
            f"the replicas of {name} have drifted apart. What was measured is worth nothing. An algorithm that lets "
            "replicas differ says so: its keeps_replicas_equal is False."
        )
