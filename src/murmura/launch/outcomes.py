"""What became of the ranks of a world, and which of their failures is the one to show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from murmura.errors import CollectiveMismatch, PeerLost, PeerTimeout, TransportError


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a result or an error; `crashed` if its process ended without a word."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""  # of an error from another process
    crashed: bool = False


def root_cause(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The failure that explains the others; `outcomes` in the order they came.

    A crash comes before an exception, an exception before the complaints of those who waited in vain.
    """

    def weight(outcome: Outcome) -> int:
        if outcome.crashed:
            return 0
        if isinstance(outcome.error, PeerLost):  # of a rank that has a failure of its own, or simply left
            return 3
        return 2 if _names_ranks(outcome.error) else 1

    failed = [outcome for outcome in outcomes if outcome.error is not None]
    return min(failed, key=weight, default=None)


def _names_ranks(error: BaseException | None) -> bool:
    return isinstance(error, TransportError | CollectiveMismatch)


def as_raised(outcome: Outcome, world_size: int) -> BaseException:
    """The error of a failed rank as run_world raises it: its own exception, with its rank in the message."""
    error = outcome.error
    assert error is not None
    if isinstance(error, SystemExit):
        error = PeerLost(
            f"rank {outcome.rank} left with sys.exit({error.code!r}) and has no result.", peer=outcome.rank
        )
    elif len(error.args) == 1 and isinstance(error.args[0], str) and not _names_ranks(error):
        error.args = (f"rank {outcome.rank}: {error.args[0]}",)
    error.add_note(f"Raised by rank {outcome.rank} of a world of {world_size}.")
    if outcome.traceback:
        error.add_note(f"Its traceback there:\n{outcome.traceback.rstrip()}")
    return error


def stuck(ranks: Sequence[int], timeout: float, fate: str) -> PeerTimeout:
    """The error for ranks that did not end when the others had."""
    names = ", ".join(map(str, ranks))
    return PeerTimeout(
        f"rank{'s' if len(ranks) > 1 else ''} {names} had not ended {timeout:.1f} s after the last of the others; "
        f"{fate}. If there was still work to do there, raise the timeout of run_world.",
        peer=ranks[0],
    )
