"""Weights are averaged by a background thread while training goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from murmura.algorithms.base import Algorithm, AlgorithmImpl
from murmura.errors import not_built
from murmura.types import Exchanges

if TYPE_CHECKING:
    from murmura.transports.base import Transport


@dataclass(frozen=True)
class AsyncModelAverageAlgorithm(Algorithm):
    """Adds mean - snapshot at a round's boundary, every so many milliseconds.

    `sync_interval_rounds` counts rounds instead of the clock, which makes a run deterministic.
    """

    sync_interval_ms: int = 500
    sync_interval_rounds: int | None = field(default=None, kw_only=True)
    warmup_rounds: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        not_built("murmura.AsyncModelAverageAlgorithm")


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl):
    """The running state of `AsyncModelAverageAlgorithm` for one model."""

    exchanges = Exchanges.WEIGHTS

    def __init__(
        self,
        process_group: Transport,
        sync_interval_ms: int = 500,
        *,
        sync_interval_rounds: int | None = None,
        warmup_rounds: int = 0,
    ) -> None:
        not_built("murmura.AsyncModelAverageAlgorithmImpl")

    def abort(self) -> None:
        """Stop averaging on all ranks until `resume`."""
        not_built("murmura.AsyncModelAverageAlgorithmImpl.abort")

    def resume(self) -> None:
        """Go on averaging after `abort`."""
        not_built("murmura.AsyncModelAverageAlgorithmImpl.resume")
