"""Weights are averaged by a background thread while training goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from murmura.algorithms.averaging_loop import AveragingLoop, mean_minus
from murmura.algorithms.background_exchange import BackgroundExchanges, PendingExchange
from murmura.algorithms.base import Algorithm, AlgorithmImpl, Parameters, Replica
from murmura.algorithms.checks import at_least, at_least_one
from murmura.algorithms.names import LOCAL_STEPS, register_algorithm
from murmura.algorithms.traffic import mean_bytes
from murmura.algorithms.weights import FlatWeights
from murmura.buckets import Bucket
from murmura.types import Exchanges, ReduceOp

if TYPE_CHECKING:
    from murmura.transports.base import Transport


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl):
    """The running state of `AsyncModelAverageAlgorithm` for one model.

    At the boundary of a round the weights are copied; mean - copy is computed beside training and added at a later
    boundary, so what training did in between is kept, and no weight is ever torn.
    """

    works_alone = False

    sync_interval_ms: int
    sync_interval_rounds: int | None
    warmup_rounds: int

    def __init__(self, process_group: Transport, **choices: Any) -> None:
        super().__init__(process_group, **choices)
        by_clock = self.sync_interval_rounds is None  # in a thread beside training, which launches when its time comes
        self._channel = process_group.host_channel("average") if by_clock else process_group.channel("average")
        self._background = BackgroundExchanges(self._channel)
        self._replica: Replica | None = None
        self._pending: PendingExchange | None = None
        self._unapplied: list[Tensor] = []  # corrections that wait for a moment at which weights may be written
        self._is_running: bool | None = None  # None until the first round that averages weights

    @property
    def exchanges(self) -> Exchanges:  # type: ignore[override]  # changes when the warm-up ends
        return Exchanges.GRADIENTS if self._round < self.warmup_rounds else Exchanges.WEIGHTS

    @property
    def in_step(self) -> bool:  # type: ignore[override]
        return self.sync_interval_rounds is not None

    @property
    def _round(self) -> int:
        return 0 if self._replica is None else self._replica.round

    def setup(self, replica: Replica) -> None:
        self._replica = replica
        self._use(FlatWeights(replica))

    def _use(self, weights: FlatWeights) -> None:
        self._weights = weights
        self._snapshot = self._weights.allocate(self._channel.allocate)
        self._correction = self._weights.allocate(self._channel.allocate)
        self._loop = AveragingLoop(self._channel, self._snapshot, self._correction, self.sync_interval_ms / 1000)

    def on_bucket_ready(self, bucket: Bucket) -> None:
        self.process_group.all_reduce(bucket.flat, ReduceOp.MEAN)

    def before_forward(self) -> None:
        if self.exchanges is Exchanges.GRADIENTS or self._channel.world_size == 1:
            return
        if self._is_running is None:
            self.resume()
        if self.sync_interval_rounds is not None and self._is_running and self._round % self.sync_interval_rounds == 0:
            self._await_average()
            self._weights.read(self._snapshot)
            for snapshot, unapplied in zip(self._snapshot, self._unapplied, strict=False):
                snapshot.add_(unapplied)
            what = f"the average of round {self._round}"
            self._pending = self._background.start(what, [*self._snapshot, *self._correction], self._average)

    def before_round(self) -> None:
        if self._is_running and self.sync_interval_rounds is None and self._channel.world_size > 1:
            self._loop.boundary(self._weights.read, self._weights.add)

    def settle(self) -> None:
        self._await_average()
        if self._unapplied:
            self._weights.add(self._unapplied)
            self._unapplied = []
        self._loop.correct(self._weights.add)

    def before_collective(self) -> None:
        """Nobody waits for a step: the average is formed in the background."""

    def _await_average(self) -> None:
        """Wait for the average under way: from now on its correction is to be added to the weights."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.wait()
            if self._unapplied:  # of an earlier round, whose correction could not be added yet
                for unapplied, correction in zip(self._unapplied, self._correction, strict=True):
                    unapplied.add_(correction)
            else:
                self._unapplied = [correction.clone() for correction in self._correction]

    def _average(self) -> None:
        mean_minus(self._channel, self._snapshot, self._correction)

    def weights_replaced(self) -> None:
        self._await_average()
        self._unapplied = []
        self._loop.correct(lambda flats: None)

    def parameters_changed(self) -> None:
        assert self._replica is not None
        was_running = self._is_running
        self.abort()
        self._loop.close()
        self._use(FlatWeights(self._replica))
        self._is_running = was_running
        if was_running:
            self.resume()

    def abort(self) -> None:
        """Stop averaging on all ranks until `resume`; between rounds. Idempotent.

        What has been averaged is added to the weights, here as on the other ranks: a part of it would move their mean.
        By the clock, the first rank that aborts stops all, and the others may train on; counted in rounds, all ranks
        abort before the same round.
        """
        self._is_running = False
        self._loop.stop()
        self.settle()

    def resume(self) -> None:
        """Go on averaging, once every rank has called; nothing happens where it goes on already.

        So every rank aborts before it resumes: one that does not know of another's `abort` yet would resume nothing.
        """
        self._is_running = True
        if self.sync_interval_rounds is None and self._channel.world_size > 1:
            self._loop.start()

    def close(self) -> None:
        if self._replica is not None:
            self._loop.close()
            self._loop.correct(self._weights.add)
        self._channel.close()


@register_algorithm("async", sync_interval_rounds=LOCAL_STEPS)
@dataclass(frozen=True)
class AsyncModelAverageAlgorithm(Algorithm):
    """Averages the weights beside training, every `sync_interval_ms`; ranks may take unequal numbers of steps.

    `sync_interval_rounds=k` counts rounds instead of the clock, which makes a run deterministic and wants equal
    numbers of steps: weights are copied before round t when t % k = 0, and corrected before round t + 1. In the first
    `warmup_rounds` gradients are averaged instead.
    """

    impl: ClassVar[type[AlgorithmImpl]] = AsyncModelAverageAlgorithmImpl

    sync_interval_ms: int = 500
    sync_interval_rounds: int | None = field(default=None, kw_only=True)
    warmup_rounds: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        at_least_one(sync_interval_ms=self.sync_interval_ms)
        if self.sync_interval_rounds is not None:
            at_least_one(sync_interval_rounds=self.sync_interval_rounds)
        at_least(0, warmup_rounds=self.warmup_rounds)

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        if self.sync_interval_rounds is None:
            return super().bytes_per_round(parameters, num_ranks)
        return mean_bytes(parameters, num_ranks) / self.sync_interval_rounds

    @property
    def period(self) -> int:
        return self.sync_interval_rounds or 1

    @property
    def hides_exchange(self) -> bool:
        return True

    @property
    def keeps_replicas_equal(self) -> bool:
        return False
