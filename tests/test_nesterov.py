"""The outer optimizer's step: torch's fused pass and the operations that it stands for give the same bits."""

from __future__ import annotations

import pytest
import torch

from murmura.algorithms.nesterov import VECTOR, nesterov_step

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("momentum", [0.9, 1 / 3, 0.0])
@pytest.mark.parametrize("length", [0, 1, VECTOR - 1, VECTOR, 1001, 2**16 + 7])
def test_a_step_is_that_of_plain_operations_to_the_bit(length: int, momentum: float, dtype: torch.dtype) -> None:
    theta, change, velocity = torch.randn(3, length + 3, generator=torch.Generator().manual_seed(length)).to(dtype)
    theta, change, velocity = theta[3:], change[3:], velocity[3:]
    wanted_velocity = velocity.mul(momentum).add(change)
    wanted = theta.sub(change.add(wanted_velocity, alpha=momentum), alpha=0.7)
    nesterov_step(theta, change, velocity, 0.7, momentum)
    assert torch.equal(velocity, wanted_velocity)
    assert torch.equal(theta, wanted)
