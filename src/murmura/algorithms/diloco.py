"""Ranks train alone; an outer optimizer moves the common weights (arXiv 2311.08105)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from murmura.algorithms.base import Algorithm, AlgorithmImpl
from murmura.errors import not_built
from murmura.types import Exchanges

if TYPE_CHECKING:
    from murmura.compressors import Compressor
    from murmura.transports.base import Transport


@dataclass(frozen=True)
class DiLoCoAlgorithm(Algorithm):
    """Applies Nesterov momentum to the mean change of the weights after every `interval`-th round."""

    interval: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    compressor: Compressor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        not_built("murmura.DiLoCoAlgorithm")


class DiLoCoAlgorithmImpl(AlgorithmImpl):
    """The running state of `DiLoCoAlgorithm` for one model."""

    exchanges = Exchanges.WEIGHTS

    def __init__(
        self,
        process_group: Transport,
        interval: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        *,
        compressor: Compressor | None = None,
    ) -> None:
        not_built("murmura.DiLoCoAlgorithmImpl")
