"""Every rank applies the mean gradient."""

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
class GradientAllReduceAlgorithm(Algorithm):
    """Averages (or sums) gradients bucket by bucket during backward."""

    hierarchical: bool = False
    average: bool = True
    compressor: Compressor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        not_built("murmura.GradientAllReduceAlgorithm")


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """The running state of `GradientAllReduceAlgorithm` for one model."""

    exchanges = Exchanges.GRADIENTS

    def __init__(
        self,
        process_group: Transport,
        hierarchical: bool = False,
        average: bool = True,
        *,
        compressor: Compressor | None = None,
    ) -> None:
        not_built("murmura.GradientAllReduceAlgorithmImpl")
