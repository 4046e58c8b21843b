"""Decentralised SGD: weights are averaged with all ranks or with one peer at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from murmura.algorithms.base import Algorithm, AlgorithmImpl
from murmura.errors import not_built
from murmura.types import Exchanges, PeerSelection

if TYPE_CHECKING:
    from murmura.transports.base import Transport


@dataclass(frozen=True)
class DecentralizedAlgorithm(Algorithm):
    """Averages the weights while forward and backward run, then steps on the local gradient."""

    hierarchical: bool = True
    peer_selection_mode: PeerSelection | str = PeerSelection.ALL
    communication_interval: int = 1

    def __post_init__(self) -> None:
        not_built("murmura.DecentralizedAlgorithm")


class DecentralizedAlgorithmImpl(AlgorithmImpl):
    """The running state of `DecentralizedAlgorithm` for one model."""

    exchanges = Exchanges.WEIGHTS

    def __init__(
        self,
        process_group: Transport,
        hierarchical: bool = True,
        peer_selection_mode: PeerSelection | str = PeerSelection.ALL,
        communication_interval: int = 1,
    ) -> None:
        not_built("murmura.DecentralizedAlgorithmImpl")
