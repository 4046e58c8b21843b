"""Every rank applies the mean gradient: what torch's own DDP does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim import Optimizer

from murmura.algorithms.base import Algorithm, AlgorithmImpl, Replica
from murmura.algorithms.checks import instances_of, yes_or_no
from murmura.algorithms.compressed import CompressedMean
from murmura.algorithms.hierarchy import Hierarchy
from murmura.algorithms.weights import as_real
from murmura.buckets import Bucket
from murmura.compressors import Compressor
from murmura.errors import UsageError
from murmura.types import Exchanges, ReduceOp

if TYPE_CHECKING:
    from murmura.transports.base import Transport


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    """The running state of `GradientAllReduceAlgorithm` for one model."""

    exchanges = Exchanges.GRADIENTS
    works_alone = False

    def __init__(
        self,
        process_group: Transport,
        hierarchical: bool = False,
        average: bool = True,
        *,
        compressor: Compressor | None = None,
    ) -> None:
        super().__init__(process_group)
        self.averages = average
        self._hierarchy = Hierarchy(process_group, hierarchical)
        self._compressor = compressor
        self._means: dict[int, tuple[Bucket, CompressedMean]] = {}  # by index of the bucket
        self._restored: dict[int, Mapping[str, Any]] = {}  # states whose bucket has not come yet
        self._rounds_since_step = 0

    def setup(self, replica: Replica) -> None:
        self._replica = replica

    def before_forward(self) -> None:
        if self._rounds_since_step and not self.averages:
            gradients = [each.grad for each in self._replica.parameters if each.grad is not None]
            if not any(bool(gradient.any()) for gradient in gradients):
                self._rounds_since_step = 0  # a step was skipped and the sum thrown away

    def on_bucket_ready(self, bucket: Bucket) -> None:
        if not self.averages and self._rounds_since_step:
            raise UsageError(
                "average=False sums gradients, and a second synchronised backward before the optimizer's step would "
                "sum the first one's again. Accumulate inside ddp.no_sync(), or use average=True."
            )
        hierarchy, op = self._hierarchy, ReduceOp.MEAN if self.averages else ReduceOp.SUM
        hierarchy.reduce_inside(bucket.flat, op)
        if self._compressor is None:
            hierarchy.reduce_between(bucket.flat, op)
        elif hierarchy.leaders is not None and hierarchy.leaders.world_size > 1:
            self._compressed_mean(bucket)(as_real(bucket.gradients))
            hierarchy.reduce_between(bucket.tail, op)
        hierarchy.spread(bucket.flat)
        if not self.averages:
            bucket.tail.div_(self.process_group.world_size)

    def after_backward(self) -> None:
        self._rounds_since_step += 1

    def before_step(self, optimizer: Optimizer) -> None:
        self._rounds_since_step = 0

    def _compressed_mean(self, bucket: Bucket) -> CompressedMean:
        known = self._means.get(bucket.index)
        if known is not None and known[0] is bucket:
            return known[1]
        hierarchy = self._hierarchy
        assert hierarchy.leaders is not None
        assert self._compressor is not None
        mean = CompressedMean(
            hierarchy.leaders,
            as_real(bucket.gradients),
            self._compressor,
            shares=hierarchy.shares if self.averages else None,
            average=self.averages,
        )
        if bucket.index in self._restored:
            mean.load_state_dict(self._restored.pop(bucket.index))
        current = {id(each) for each in self._replica.buckets}  # those of an older plan are let go
        self._means = {index: each for index, each in self._means.items() if id(each[0]) in current}
        self._means[bucket.index] = bucket, mean
        return mean

    def state_dict(self) -> dict[str, Any]:
        means = {index: mean.state_dict() for index, (_, mean) in self._means.items()}
        return {"rounds_since_step": self._rounds_since_step, "compressed": {**means, **self._restored}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rounds_since_step = state["rounds_since_step"]
        self._means = {}
        self._restored = dict(state["compressed"])


@dataclass(frozen=True)
class GradientAllReduceAlgorithm(Algorithm):
    """Averages (or, with ``average=False``, sums) gradients bucket by bucket during backward.

    `compressor` sends fewer bytes: with ``Cast(torch.bfloat16)`` half of float32's.
    """

    impl: ClassVar[type[AlgorithmImpl]] = GradientAllReduceAlgorithmImpl

    hierarchical: bool = False
    average: bool = True
    compressor: Compressor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        yes_or_no(hierarchical=self.hierarchical, average=self.average)
        if self.compressor is not None:
            instances_of(Compressor, compressor=self.compressor)
