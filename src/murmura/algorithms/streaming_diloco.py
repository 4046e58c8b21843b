"""DiLoCo whose fragments are exchanged in turn, beside training (Streaming DiLoCo, arXiv 2501.18512)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from murmura.algorithms.base import AlgorithmImpl, Parameters
from murmura.algorithms.checks import at_least_one, is_real
from murmura.algorithms.diloco import DiLoCoAlgorithm, DiLoCoAlgorithmImpl
from murmura.algorithms.names import LOCAL_STEPS, register_algorithm
from murmura.algorithms.traffic import mean_bytes, num_elements
from murmura.collectives.chunks import chunk_bounds
from murmura.compressors import Compressor
from murmura.errors import ConfigError

MOST_OVERLAP = 5
"""The largest default `overlap` in rounds: up to it the paper finds no loss in quality."""


class StreamingDiLoCoAlgorithmImpl(DiLoCoAlgorithmImpl):
    """The running state of `StreamingDiLoCoAlgorithm` for one model: that of `DiLoCoAlgorithm` with other choices.

    A state tells by the name of this class whose it is, so that neither algorithm takes over the other's.
    """


@register_algorithm("streaming_diloco", interval=LOCAL_STEPS)
@dataclass(frozen=True)
class StreamingDiLoCoAlgorithm(DiLoCoAlgorithm):
    """Exchanges the change of one of `fragments` at a time, each once in `interval` rounds, while training goes on.

    The outcome is taken over `overlap` rounds later: the weights keep a share `alpha` of their own. The last fragment
    arrives after every `interval`-th round. At most one travels at any time, so `overlap` is at most
    interval // fragments; unless it is given it is one less, but from 1 to 5. With one fragment, no overlap, alpha 0
    and no compressor it is `DiLoCoAlgorithm`, to the bit.
    """

    impl: ClassVar[type[AlgorithmImpl]] = StreamingDiLoCoAlgorithmImpl

    fragments: int = field(default=4, kw_only=True)
    overlap: int | None = field(default=None, kw_only=True)
    alpha: float = field(default=0.5, kw_only=True)
    compressor: Compressor | str | None = field(default="uint4", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(fragments=self.fragments)
        if self.fragments > self.interval:
            raise ConfigError(
                f"fragments={self.fragments!r} cannot each have a round of their own in interval={self.interval}. "
                f"Give at most {self.interval}, or a longer interval."
            )
        gap = self.interval // self.fragments
        overlap = min(max(gap - 1, 1), MOST_OVERLAP) if self.overlap is None else self.overlap
        if isinstance(overlap, bool) or not isinstance(overlap, int) or not 0 <= overlap <= gap:
            raise ConfigError(
                f"overlap={overlap!r} must be a whole number from 0 to {gap} (interval // fragments): then a fragment "
                "has arrived before the next one is sent. Give a smaller one, fewer fragments, or a longer interval."
            )
        object.__setattr__(self, "overlap", overlap)
        if not is_real(self.alpha) or not 0 <= self.alpha < 1:
            raise ConfigError(
                f"alpha={self.alpha!r} must be a number from 0 up to below 1: the share of its own weights that a rank "
                "keeps when it takes over the common ones."
            )

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        numel = num_elements(parameters)
        bounds = [chunk_bounds(numel, self.fragments, index) for index in range(self.fragments)]
        total = sum(mean_bytes(stop - start, num_ranks, self.compressor) for start, stop in bounds)
        moments = 2 * mean_bytes(numel, num_ranks) if self.average_moments else 0
        return (total + moments) / self.interval

    @property
    def hides_exchange(self) -> bool:
        return bool(self.overlap)

    @property
    def keeps_replicas_equal(self) -> bool:
        return self.fragments == 1 and not self.overlap and not self.alpha
