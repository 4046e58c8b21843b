"""Break the time of a step down into its parts, and find the rank that the others wait for.

Every figure of a step's time, in tables, bars and sentences, is the median over turns of `TURN_STEPS` steps, or of as
many as the run says: one step of an algorithm that communicates once in so many says nothing of the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from murmura.algorithms.names import LOCAL_STEPS
from murmura.observe import Record

TURN_STEPS = LOCAL_STEPS
NOTICEABLE = 1.1
"""A rank is called slow if its own work takes this many times as long as the others'."""


def turns(records: Sequence[Record], turn_steps: int = TURN_STEPS) -> list[float]:
    """Return the milliseconds per step in each turn of one rank; the last turn may be shorter."""
    walls = [record.wall_ms for record in records]
    return [statistics.fmean(walls[begin : begin + turn_steps]) for begin in range(0, len(walls), turn_steps)]


def slowest_turns(records: Mapping[int, Sequence[Record]], turn_steps: int = TURN_STEPS) -> list[float]:
    """Return the milliseconds per step in each turn, of the slowest rank in that turn."""
    by_rank = [turns(of_rank, turn_steps) for of_rank in records.values()]
    return [max(of_ranks) for of_ranks in zip(*by_rank, strict=False)]


@dataclass(frozen=True)
class Breakdown:
    """A step of one rank: step_ms = compute_ms + waited_ms, and hidden_ms lies within compute_ms."""

    step_ms: float
    compute_ms: float
    hidden_ms: float
    waited_ms: float
    step_bytes: float  # bytes sent

    @classmethod
    def of(
        cls, records: Sequence[Record], num_ranks: int, step_ms: float | None = None, turn_steps: int = TURN_STEPS
    ) -> Breakdown:
        """Return the median step of the records, or `step_ms`, divided in the proportions of the sum of all steps."""
        mean_ms = statistics.fmean(record.wall_ms for record in records)
        if step_ms is None:
            step_ms = statistics.median(turns(records, turn_steps))
        scale = step_ms / mean_ms if mean_ms else 1.0
        return cls(
            step_ms=step_ms,
            compute_ms=scale * statistics.fmean(record.compute_ms for record in records),
            hidden_ms=scale * statistics.fmean(record.hidden_ms for record in records),
            waited_ms=scale * statistics.fmean(record.waited_ms for record in records),
            step_bytes=statistics.fmean(wire_bytes(record.bytes, num_ranks) for record in records),
        )

    @classmethod
    def of_run(cls, records: Mapping[int, Sequence[Record]], num_ranks: int, turn_steps: int = TURN_STEPS) -> Breakdown:
        """Return the step of the slowest rank, divided in the proportions of all ranks' steps."""
        together = [record for of_rank in records.values() for record in of_rank]
        return cls.of(together, num_ranks, statistics.median(slowest_turns(records, turn_steps)))

    @property
    def bytes_per_second(self) -> float:
        return self.step_bytes / self.step_ms * 1000 if self.step_ms else 0.0

    @property
    def parts(self) -> tuple[float, float, float]:
        """Return milliseconds that add up to a step: computing alone, computing during an exchange, waiting."""
        hidden = min(self.hidden_ms, self.compute_ms)
        return self.compute_ms - hidden, hidden, self.waited_ms


def straggler(ranks: Mapping[int, Breakdown]) -> int | None:
    """Return the rank whose own work takes longest, if it is noticeably longer than the others'."""
    if len(ranks) < 2:
        return None
    slowest = max(ranks, key=lambda rank: ranks[rank].compute_ms)
    others = statistics.median(each.compute_ms for rank, each in ranks.items() if rank != slowest)
    return slowest if ranks[slowest].compute_ms > NOTICEABLE * others else None


def readable_bytes(num_bytes: float) -> str:
    """Format with about three digits: 950 B, 12.3 kB, 4.56 MB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            value = num_bytes / factor
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{num_bytes:.0f} B"


def wire_bytes(operations: Mapping[str, int], num_ranks: int) -> float:
    """Return the bytes that a rank sends for those passed to each operation, if collectives are rings."""
    n = num_ranks
    if n == 1:
        return 0.0
    factors = {
        "all_reduce": 2 * (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_to_all": (n - 1) / n,
        "scatter": (n - 1) / n,
        "all_gather": n - 1.0,
    }
    return sum(factors.get(name, 1.0) * given for name, given in operations.items())
