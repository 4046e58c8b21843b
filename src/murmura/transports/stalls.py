"""Stall notes: whom a rank waits for in vain, told where every rank of the world can read it.

A rank may wait for a peer that lives and waits for a third one on another channel; their deadlines pass together. So a
rank whose deadline passes first tells whom it waits for, then gives the others a grace to tell the same, and blames the
rank at the end of the chain, which has told nothing. A note is forgotten after `NOTE_SECONDS`: whoever told it has
given up since, and if its program caught the error and went on, it waits for nobody. Ranks are those of the world.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["StallNotes", "at_fault", "grace_seconds", "is_recent"]

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


def at_fault(awaited: Sequence[int], notes: StallNotes, own: int) -> list[int]:
    """The ranks on which `awaited` hang at last; `awaited` themselves if they wait for each other, or for `own`."""
    seen, last = {own}, []
    ahead = list(awaited)
    while ahead:
        rank = ahead.pop(0)
        if rank in seen:
            continue
        seen.add(rank)
        further = notes.awaited_by(rank)
        ahead += further
        if not further:
            last.append(rank)
    return last or list(awaited)
