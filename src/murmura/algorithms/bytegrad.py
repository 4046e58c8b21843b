"""Every rank applies the mean gradient, sent in eight bits (Bagua, arXiv 2107.01499)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters
from murmura.algorithms.checks import take_compressor, yes_or_no
from murmura.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl
from murmura.algorithms.names import register_algorithm
from murmura.algorithms.traffic import mean_bytes
from murmura.compressors import Compressor, MinMaxUInt8


class ByteGradAlgorithmImpl(GradientAllReduceAlgorithmImpl):
    """The running state of `ByteGradAlgorithm` for one model."""


@register_algorithm("bytegrad")
@dataclass(frozen=True)
class ByteGradAlgorithm(Algorithm):
    """Averages (or sums) compressed gradients: Q(mean Q(g)), bit-equal on all ranks."""

    impl: ClassVar[type[AlgorithmImpl]] = ByteGradAlgorithmImpl

    hierarchical: bool = True
    average: bool = True
    compressor: Compressor | str = field(default_factory=MinMaxUInt8, kw_only=True)

    def __post_init__(self) -> None:
        yes_or_no(hierarchical=self.hierarchical, average=self.average)
        take_compressor(self, self.compressor)

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        return mean_bytes(parameters, num_ranks, self.compressor)
