"""The optimizer that QAdamAlgorithm works with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import Optimizer

from murmura.errors import not_built

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


class QAdamOptimizer(Optimizer):
    """Adam for `warmup_steps` steps; then the second moment is frozen and the first averaged in 8 bits."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        not_built("murmura.QAdamOptimizer")
