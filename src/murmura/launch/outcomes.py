"""How the ranks of `run_world` ended, and the errors that it raises for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from murmura.errors import CollectiveMismatch, PeerLost, PeerTimeout, TransportError, name_ranks
from murmura.launch.root_cause import CRASH_PRIORITY, exception_priority

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a result or an error; `crashed` if its process ended without reporting either."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""  # of an error from another process
    crashed: bool = False

    @property
    def priority(self) -> int:
        return (
            CRASH_PRIORITY if self.crashed else exception_priority(each.__name__ for each in type(self.error).__mro__)
        )


def failed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.error is not None]


def collect(
    receive: Callable[[float], Sequence[Outcome]],
    outcomes: list[Outcome],
    world_size: int,
    timeout: float,
    *,
    all_of_them: bool = False,
) -> None:
    """Append outcomes until all ranks have ended, one has failed (unless `all_of_them`), or none ends for `timeout`.

    `receive` waits for the next outcomes, at most the seconds it is given, and returns them.
    """
    last = time.monotonic()
    while len(outcomes) < world_size and (all_of_them or not failed(outcomes)):
        if received := receive(POLL_SECONDS):
            outcomes += received
            last = time.monotonic()
        elif (outcomes or all_of_them) and time.monotonic() - last > timeout:
            return


def as_raised(outcome: Outcome, world_size: int) -> BaseException:
    """Return the error that run_world raises for a failed rank: its own exception, with its rank in the message."""
    error = outcome.error
    assert error is not None
    if isinstance(error, SystemExit):
        error = PeerLost(
            f"rank {outcome.rank} left with sys.exit({error.code!r}) and has no result.", peer=outcome.rank
        )
    elif (
        len(error.args) == 1
        and isinstance(error.args[0], str)
        and not isinstance(error, TransportError | CollectiveMismatch)  # these name ranks already
    ):
        error.args = (f"rank {outcome.rank}: {error.args[0]}",)
    error.add_note(f"Raised by rank {outcome.rank} of a world of {world_size}.")
    if outcome.traceback:
        error.add_note(f"Its traceback there:\n{outcome.traceback.rstrip()}")
    return error


def unfinished(ranks: Sequence[int], timeout: float, consequence: str) -> PeerTimeout:
    """Return the error for ranks that were still running `timeout` seconds after the last of the others ended."""
    return PeerTimeout(
        f"{name_ranks(ranks)} had not ended {timeout:.1f} s after the last of the others; "
        f"{consequence}. If there was still work to do there, raise the timeout of run_world.",
        peer=ranks[0],
    )
