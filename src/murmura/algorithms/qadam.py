"""Adam whose momenta travel in eight bits after a warm-up on gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from murmura.algorithms.base import Algorithm, AlgorithmImpl
from murmura.errors import not_built
from murmura.types import Exchanges

if TYPE_CHECKING:
    from murmura.algorithms.qadam_optimizer import QAdamOptimizer
    from murmura.transports.base import Transport


@dataclass(frozen=True)
class QAdamAlgorithm(Algorithm):
    """Serves the one model of `optimizer`; None finds the QAdamOptimizer at its first step."""

    optimizer: QAdamOptimizer | None = None
    hierarchical: bool = True

    def __post_init__(self) -> None:
        not_built("murmura.QAdamAlgorithm")


class QAdamAlgorithmImpl(AlgorithmImpl):
    """The running state of `QAdamAlgorithm` for one model."""

    exchanges = Exchanges.MOMENTA

    def __init__(
        self, process_group: Transport, optimizer: QAdamOptimizer | None = None, hierarchical: bool = True
    ) -> None:
        not_built("murmura.QAdamAlgorithmImpl")
