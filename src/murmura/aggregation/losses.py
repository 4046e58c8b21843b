"""One loss for the whole world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from murmura.errors import not_built

if TYPE_CHECKING:
    from murmura.transports.base import Transport


def average_losses(transport: Transport, loss: Tensor | float, num_samples: int) -> float:
    """The mean loss over all samples of all ranks: each rank's mean `loss` counts `num_samples` times."""
    not_built("murmura.average_losses")
