"""The step of an outer optimizer: Nesterov momentum on flat tensors."""

from __future__ import annotations

import torch
from torch import Tensor

VECTOR = 64  # elements: a multiple of what a vector register holds on any CPU


def nesterov_step(theta: Tensor, change: Tensor, velocity: Tensor, lr: float, momentum: float) -> None:
    """v ← μ v + d and θ ← θ - lr (d + μ v); what becomes of d is undefined.

    On a CPU it is one pass of torch's fused optimizer. To the same bits: but elements that do not fill a vector
    register are rounded otherwise there, so these are left out.
    """
    whole = 0
    if theta.is_cpu and theta.dtype == torch.float32 and momentum:
        whole = theta.numel() // VECTOR * VECTOR
        torch._fused_sgd_(
            [theta[:whole]],
            [change[:whole]],
            [velocity[:whole]],
            lr=lr,
            momentum=momentum,
            dampening=0.0,
            weight_decay=0.0,
            nesterov=True,
            maximize=False,
            is_first_step=False,
        )
    theta, change, velocity = theta[whole:], change[whole:], velocity[whole:]
    velocity.mul_(momentum).add_(change)
    theta.sub_(change.add_(velocity, alpha=momentum), alpha=lr)
