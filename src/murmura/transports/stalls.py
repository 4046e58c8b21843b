"""Waits that take long: when a rank warns, when it gives up, and how it finds the rank that holds up the others.

Stall notes say whom a rank waits for in vain, where every rank of the world can read it. A rank may wait for a peer
that lives and waits for a third one on another channel; their deadlines pass together. So a rank whose deadline passes
first tells whom it waits for, then gives the others a grace to tell the same, and blames the rank at the end of the
chain, which has told nothing. A note is forgotten after `NOTE_SECONDS`: whoever told it has given up since, and if its
program caught the error and went on, it waits for nobody. Ranks here are those of the world.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from murmura.collectives.deadline import Deadline
from murmura.errors import name_ranks

if TYPE_CHECKING:
    from murmura.transports.error_reporter import Reporter

__all__ = ["StallNotes", "WaitDeadline", "at_fault", "grace_seconds", "is_recent"]

log = logging.getLogger("murmura")

WARN_SECONDS = 10.0  # of waiting, until a rank warns for the first time
FEW_SECONDS, MOST_SECONDS = 0.6, 2.0
NOTE_SECONDS = 10.0  # for which a note counts: several times the longest grace, in which the others read it


class StallNotes(Protocol):
    """The notes of all ranks of a world, seen from one of them."""

    def tell(self, awaited: Sequence[int]) -> None:
        """This rank waits for `awaited` in vain; or no longer, if that is empty."""

    def awaited_by(self, rank: int) -> Sequence[int]:
        """Whom `rank` waits for in vain; empty if it has told nothing, or that long ago."""


def grace_seconds(timeout: float) -> float:
    """How long after its deadline a rank waits for the others' notes; with what follows, less than 1 s plus 10 %."""
    return min(MOST_SECONDS, FEW_SECONDS + 0.06 * timeout)


def is_recent(told: float, now: float) -> bool:
    """Whether a note that was told at `told` still counts."""
    return abs(now - told) < NOTE_SECONDS


def at_fault(awaited: Sequence[int], awaited_by: Callable[[int], Sequence[int]], own: int) -> list[int]:
    """Return the ranks at the end of the chains of waits that begin at `awaited`.

    `awaited_by(r)` is whom rank r waits for. If all chains lead back to `own` or run in a circle, return `awaited`.
    """
    seen, last = {own}, []
    ahead = list(awaited)
    while ahead:
        rank = ahead.pop(0)
        if rank in seen:
            continue
        seen.add(rank)
        further = awaited_by(rank)
        ahead += further
        if not further:
            last.append(rank)
    return last or list(dict.fromkeys(awaited))


class WaitDeadline(Deadline):
    """The deadline of one wait for peers; it warns when the wait has become long, each time after twice as long.

    With `notes` a wait whose time is up goes on for a grace, in which whoever is awaited may tell why it does not come.
    """

    def __init__(
        self, reporter: Reporter, operation: str, timeout: float | None = None, notes: StallNotes | None = None
    ) -> None:
        super().__init__(timeout)
        self._reporter = reporter
        self._operation = operation
        self._notes = notes
        self._grace = 0.0
        self._warn_after = WARN_SECONDS

    @property
    def remaining(self) -> float:
        return super().remaining + self._grace

    def end(self) -> None:
        """Nobody is awaited any more."""
        if self._grace and self._notes is not None:
            self._notes.tell([])

    def check(self, awaited: Sequence[int], state: str = "", *, certain: bool = False) -> None:
        """Raise `PeerTimeout` if the time is up, without a grace if `certain`; warn if the wait has become long."""
        waited = self.waited
        if waited >= self.timeout + self._grace:
            if self._notes is not None and not self._grace:
                self._notes.tell(self._reporter.names(awaited))
                if not certain:
                    self._grace = grace_seconds(self.timeout)
                    return
            raise self._reporter.timed_out(awaited, self._operation, waited, state, self._notes)
        if waited >= self._warn_after and not self._grace:
            self._warn_after *= 2
            log.warning(
                "rank %d has waited %.0f s for %s in %s%s.%s",
                self._reporter.own, waited, name_ranks(self._reporter.names(awaited)), self._operation,
                "" if self.timeout == math.inf else f"; it gives up after {self.timeout:.0f} s",
                f" {state}" if state else "",
            )  # fmt: skip
