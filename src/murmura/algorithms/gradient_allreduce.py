"""Every rank applies the mean gradient: what torch's own DDP does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torch.optim import Optimizer

from murmura.algorithms.base import Algorithm, AlgorithmImpl
from murmura.buckets import Bucket
from murmura.errors import ConfigError, UsageError
from murmura.types import Exchanges, ReduceOp

if TYPE_CHECKING:
    from murmura.compressors import Compressor
    from murmura.transports.base import Transport


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
        super().__init__(process_group)
        if hierarchical or compressor is not None:
            raise ConfigError(
                "GradientAllReduceAlgorithm takes neither hierarchical=True nor a compressor in this version; "
                "leave both out."
            )
        self.averages = average
        self._rounds_since_step = 0

    def on_bucket_ready(self, bucket: Bucket) -> None:
        if self.averages:
            self.process_group.all_reduce(bucket.flat, ReduceOp.MEAN)
            return
        if self._rounds_since_step:
            raise UsageError(
                "average=False sums gradients, and a second synchronised backward before the optimizer's step would "
                "sum the first one's again. Accumulate inside ddp.no_sync(), or use average=True."
            )
        self.process_group.all_reduce(bucket.flat, ReduceOp.SUM)
        bucket.tail.div_(self.process_group.world_size)

    def after_backward(self) -> None:
        self._rounds_since_step += 1

    def before_step(self, optimizer: Optimizer) -> None:
        self._rounds_since_step = 0


@dataclass(frozen=True)
class GradientAllReduceAlgorithm(Algorithm):
    """Averages (or, with ``average=False``, sums) gradients bucket by bucket during backward."""

    impl: ClassVar[type[AlgorithmImpl]] = GradientAllReduceAlgorithmImpl

    hierarchical: bool = False
    average: bool = True
    compressor: Compressor | None = field(default=None, kw_only=True)
