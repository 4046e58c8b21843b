"""Every rank applies the mean gradient, sent in eight bits."""

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
class ByteGradAlgorithm(Algorithm):
    """Averages (or sums) compressed gradients: Q(mean Q(g)), bit-equal on all ranks."""

    hierarchical: bool = True
    average: bool = True
    compressor: Compressor = field(default_factory=MinMaxUInt8, kw_only=True)

    def __post_init__(self) -> None:
        not_built("murmura.ByteGradAlgorithm")


class ByteGradAlgorithmImpl(AlgorithmImpl):
    """The running state of `ByteGradAlgorithm` for one model.

    `compressor=None` is MinMaxUInt8().
    """

    exchanges = Exchanges.GRADIENTS

    def __init__(
        self,
        process_group: Transport,
        hierarchical: bool = True,
        average: bool = True,
        *,
        compressor: Compressor | None = None,
    ) -> None:
        not_built("murmura.ByteGradAlgorithmImpl")
