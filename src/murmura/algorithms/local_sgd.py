"""Ranks train alone and average their weights now and then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from murmura.algorithms.base import Algorithm, AlgorithmImpl
from murmura.errors import not_built
from murmura.types import Exchanges

if TYPE_CHECKING:
    from murmura.transports.base import Transport


@dataclass(frozen=True)
class LocalSGDAlgorithm(Algorithm):
    """Averages weights after the step of every `interval`-th round."""

    interval: int

    def __post_init__(self) -> None:
        not_built("murmura.LocalSGDAlgorithm")


class LocalSGDAlgorithmImpl(AlgorithmImpl):
    """The running state of `LocalSGDAlgorithm` for one model."""

    exchanges = Exchanges.WEIGHTS

    def __init__(self, process_group: Transport, interval: int) -> None:
        not_built("murmura.LocalSGDAlgorithmImpl")
