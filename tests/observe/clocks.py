"""A clock that tests move by hand, and a small model to watch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MS = 1_000_000


class HandClock:
    """Nanoseconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000 * MS

    def __call__(self) -> int:
        return self.now

    def pass_ms(self, milliseconds: int) -> None:
        self.now += milliseconds * MS


def small_model() -> nn.Module:
    """Two layers of whole numbers, so that every rank and run has the same."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, number + 1)
    return model


def batch(rank: int) -> Tensor:
    return torch.full((3, 4), rank + 1.0)
