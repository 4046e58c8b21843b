"""Every rank applies the mean gradient: what torch's own DDP does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters
from murmura.algorithms.checks import check_fields, take_compressor, yes_or_no
from murmura.algorithms.codec_thread import CodecThread
from murmura.algorithms.compressed import CompressedMean, Residual, carries_state, check_residuals
from murmura.algorithms.hierarchy import Hierarchy
from murmura.algorithms.means import compressed_mean
from murmura.algorithms.names import register_algorithm
from murmura.algorithms.skipped_steps import SkippedStepsImpl
from murmura.algorithms.traffic import mean_bytes
from murmura.algorithms.weights import as_real
from murmura.buckets import Bucket
from murmura.compressors import Compressor
from murmura.errors import UsageError
from murmura.types import Exchanges, ReduceOp

if TYPE_CHECKING:
    from murmura.transports.base import Transport


class GradientAllReduceAlgorithmImpl(SkippedStepsImpl):
    """The running state of `GradientAllReduceAlgorithm` for one model."""

    exchanges = Exchanges.GRADIENTS
    works_alone = False

    hierarchical: bool = False
    average: bool = True
    compressor: Compressor | None = None

    def __init__(self, process_group: Transport, **choices: Any) -> None:
        super().__init__(process_group, **choices)
        self.averages = self.average
        self.weighs_first = self.compressor is not None
        self._hierarchy = Hierarchy(process_group, self.hierarchical)
        self._codec = CodecThread()
        self._means: dict[int, CompressedMean] = {}  # by index of the bucket
        self._restored: dict[int, Mapping[str, Any]] = {}  # states whose bucket has not come yet

    def remembers(self) -> bool:
        return bool(self._means or self._restored or not self.averages)

    def skip_step(self) -> None:
        if self._exchanges_compressed:
            for bucket in self._replica.buckets:
                self._compressed_mean(bucket).restore_kept()

    def on_bucket_ready(self, bucket: Bucket) -> None:
        if not self.averages and self._rounds_since_step:
            raise UsageError(
                "average=False sums gradients, and a second synchronised backward before the optimizer's step would "
                "sum the first one's again. Accumulate inside ddp.no_sync(), or use average=True."
            )
        hierarchy, op = self._hierarchy, ReduceOp.MEAN if self.averages else ReduceOp.SUM
        if self.compressor is None:
            hierarchy.reduce(bucket.flat, op)
            return
        hierarchy.reduce_inside(bucket.flat, op)
        if self._exchanges_compressed:
            mean = self._compressed_mean(bucket)
            mean.keep_residuals()
            mean(as_real(bucket.flat))
        hierarchy.spread(bucket.flat)

    def parameters_unused(self, names: Sequence[str]) -> None:
        if self._exchanges_compressed:
            unused = set(names)
            for bucket in self._replica.buckets:
                if not unused.isdisjoint(bucket.names):
                    self._compressed_mean(bucket).restore_kept_of(unused, bucket.names, _real_numels(bucket))

    @property
    def _exchanges_compressed(self) -> bool:
        leaders = self._hierarchy.leaders
        return self.compressor is not None and leaders is not None and leaders.world_size > 1

    def round_is_over(self) -> None:
        super().round_is_over()
        for mean in self._means.values():
            mean.forget_kept()
        self._restored = {index: {**state, "kept": None} for index, state in self._restored.items()}

    def before_replan(self, buckets: Sequence[Bucket]) -> None:
        if not self._exchanges_compressed or self.compressor is None or not carries_state(self.compressor):
            self._means = {}
            return
        residuals = self._residuals()
        kept = None
        if any(mean.has_kept for mean in self._means.values()):
            for mean in self._means.values():
                mean.restore_kept()
            kept = self._residuals()
        self._means = {}
        for bucket in buckets:
            mean = self._compressed_mean(bucket)
            if kept is not None:
                mean.set_residuals(bucket.names, _real_numels(bucket), kept)
                mean.keep_residuals()
            mean.set_residuals(bucket.names, _real_numels(bucket), residuals)

    def _residuals(self) -> dict[str, Residual]:
        residuals: dict[str, Residual] = {}
        for bucket in self._replica.buckets:
            residuals |= self._compressed_mean(bucket).residuals(bucket.names, _real_numels(bucket))
        return residuals

    def _compressed_mean(self, bucket: Bucket) -> CompressedMean:
        if bucket.index not in self._means:
            hierarchy = self._hierarchy
            assert hierarchy.leaders is not None
            assert self.compressor is not None
            mean = self._means[bucket.index] = compressed_mean(
                hierarchy.leaders,
                as_real(bucket.flat),
                self.compressor,
                self._codec,
                shares=hierarchy.shares if self.averages else None,
                average=self.averages,
            )
            if bucket.index in self._restored:
                mean.load_state_dict(self._restored.pop(bucket.index))
        return self._means[bucket.index]

    def close(self) -> None:
        self._codec.close()

    def state_dict(self) -> dict[str, Any]:
        means = {index: mean.state_dict() for index, mean in self._means.items()}
        return {"rounds_since_step": self._rounds_since_step, "compressed": {**means, **self._restored}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_fields(state, rounds_since_step=int, compressed=Mapping)
        leaders = self._hierarchy.leaders
        for each in state["compressed"].values():
            check_residuals(each, self.compressor, None if leaders is None else leaders.world_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rounds_since_step = state["rounds_since_step"]
        self._means = {}
        self._restored = dict(state["compressed"])


def _real_numels(bucket: Bucket) -> list[int]:
    return [numel * (2 if bucket.flat.is_complex() else 1) for numel in bucket.numels]


@register_algorithm("gradient_allreduce")
@dataclass(frozen=True)
class GradientAllReduceAlgorithm(Algorithm):
    """Averages (or, with ``average=False``, sums) gradients bucket by bucket during backward.

    `compressor` sends fewer bytes: with ``Cast(torch.bfloat16)`` half of float32's.
    """

    impl: ClassVar[type[AlgorithmImpl]] = GradientAllReduceAlgorithmImpl

    hierarchical: bool = False
    average: bool = True
    compressor: Compressor | str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        yes_or_no(hierarchical=self.hierarchical, average=self.average)
        if self.compressor is not None:
            take_compressor(self, self.compressor)

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        return mean_bytes(parameters, num_ranks, self.compressor)
