"""Decentralised SGD on a ring with weight differences of eight bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from murmura.algorithms.base import Algorithm, AlgorithmImpl
from murmura.compressors import Compressor, MinMaxUInt8
from murmura.errors import not_built
from murmura.types import Exchanges

if TYPE_CHECKING:
    from murmura.transports.base import Transport


@dataclass(frozen=True)
class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """Sends the compressed change of the weights to both ring neighbours after the optimizer's step."""

    hierarchical: bool = True
    communication_interval: int = 1
    compressor: Compressor = field(default_factory=MinMaxUInt8, kw_only=True)

    def __post_init__(self) -> None:
        not_built("murmura.LowPrecisionDecentralizedAlgorithm")


class LowPrecisionDecentralizedAlgorithmImpl(AlgorithmImpl):
    """The running state of `LowPrecisionDecentralizedAlgorithm` for one model.

    `compressor=None` is MinMaxUInt8().
    """

    exchanges = Exchanges.WEIGHTS

    def __init__(
        self,
        process_group: Transport,
        hierarchical: bool = True,
        communication_interval: int = 1,
        *,
        compressor: Compressor | None = None,
    ) -> None:
        not_built("murmura.LowPrecisionDecentralizedAlgorithmImpl")
