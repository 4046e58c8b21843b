"""The words of a transport's errors: who waited for whom, in which operation, and what to do.

Also the stall warning, so that a rank that waits says so long before its deadline.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from murmura.errors import CollectiveMismatch, PeerLost, PeerTimeout, TransportError

__all__ = ["Departure", "Patience", "again", "mismatch", "peer_lost", "peer_timeout", "words_of"]

log = logging.getLogger("murmura")

STALL_SECONDS = 10.0


def _name(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def peer_timeout(rank: int, awaited: Sequence[int], operation: str, waited: float, state: str = "") -> PeerTimeout:
    """`awaited` live but did not come; `state` says what is known of them, as a sentence."""
    return PeerTimeout(
        f"rank {rank} waited {waited:.1f} s for {_name(awaited)} in {operation}. {state}"
        f"{' ' if state else ''}If they are only slow, raise the timeout (DistributedConfig.timeout, or timeout= of "
        "the call); if they are stuck, look at what they do (py-spy dump --pid PID).",
        rank=rank,
        peer=awaited[0],
        operation=operation,
    )


def peer_lost(rank: int, peer: int, operation: str, story: str) -> PeerLost:
    """`story` says what became of `peer`: "was killed or exited without closing", "raised ValueError: …"."""
    return PeerLost(
        f"rank {rank} lost rank {peer} in {operation}: rank {peer} {story}. "
        f"Look at rank {peer}'s own output for the cause; this transport is unusable, so start the world anew.",
        rank=rank,
        peer=peer,
        operation=operation,
    )


def mismatch(rank: int, operation: str, calls: Mapping[int, str]) -> CollectiveMismatch:
    """The table of who called what; ranks that did not say are listed as such."""
    rows = "\n".join(f"  rank {each}: {call}" for each, call in sorted(calls.items()))
    return CollectiveMismatch(
        f"rank {rank}: the ranks disagree in {operation}:\n{rows}\n"
        "Every rank must call the same operations in the same order, with the same dtype and shape.",
        dict(calls),
    )


def words_of(error: BaseException) -> str:
    """Kind and message of any exception, also of one that cannot be put into words."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # whatever its own __str__ raises
        return f"{type(error).__name__} (its message cannot be read)"


@dataclass(frozen=True)
class Departure:
    """Why a rank can no longer be waited for, as it tells its peers: they then raise the same cause, not a guess."""

    story: str = "closed its transport and left"
    kind: str = "left"  # left, raised, lost, timeout or mismatch
    culprit: int | None = None  # the rank at fault, when it is another one
    calls: dict[str, str] = field(default_factory=dict)  # of a mismatch, by rank

    @classmethod
    def of(cls, error: BaseException, *, same_ranks: bool = True) -> Departure:
        """What `error` means to the peers; `same_ranks` is False where they are numbered otherwise."""
        story = f"raised {words_of(error)}"
        if same_ranks and isinstance(error, CollectiveMismatch):
            return cls(story, "mismatch", calls={str(rank): call for rank, call in error.calls.items()})
        if same_ranks and isinstance(error, PeerTimeout | PeerLost) and error.peer is not None:
            return cls(story, "timeout" if isinstance(error, PeerTimeout) else "lost", error.peer)
        return cls(story, "raised")

    def as_error(self, rank: int, peer: int, operation: str) -> TransportError | CollectiveMismatch:
        """The error that `rank` raises because it waits for `peer`, which departed so."""
        if self.kind == "mismatch":
            return mismatch(rank, operation, {int(each): call for each, call in self.calls.items()})
        if self.culprit is None or self.culprit == rank:
            lost = peer_lost(rank, peer, operation, self.story)
            lost.left = self.kind == "left"
            return lost
        if self.kind == "timeout":
            return peer_timeout(rank, [self.culprit], operation, 0.0, f"Rank {peer} gave up on it first.")
        return peer_lost(rank, self.culprit, operation, f"was lost to rank {peer} before, which {self.story}")

    def to_bytes(self, limit: int) -> bytes:
        """As JSON of at most `limit` bytes; a long story loses its end."""
        departure = self
        while len(encoded := json.dumps(asdict(departure)).encode()) > limit:
            departure = replace(departure, story=departure.story[: len(departure.story) * 3 // 4], calls={})
        return encoded

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Departure:
        return cls(**json.loads(encoded))


class Patience:
    """How long one wait may still last; warns when it has become long, ever less often."""

    def __init__(self, rank: int, operation: str, timeout: float) -> None:
        self._rank = rank
        self._operation = operation
        self._began = time.monotonic()
        self._timeout = timeout
        self._warn_after = STALL_SECONDS

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        return self._timeout - self.waited

    def check(self, awaited: Sequence[int], state: str = "") -> None:
        """Raise `PeerTimeout` if the time is up; warn if the wait has become long."""
        waited = self.waited
        if waited >= self._timeout:
            raise peer_timeout(self._rank, awaited, self._operation, waited, state)
        if waited >= self._warn_after:
            self._warn_after *= 2
            log.warning(
                "rank %d has waited %.0f s for %s in %s; it gives up after %.0f s.%s",
                self._rank, waited, _name(awaited), self._operation, self._timeout,
                f" {state}" if state else "",
            )  # fmt: skip


def again(first: BaseException) -> TransportError | CollectiveMismatch:
    """The error of a call on a transport that `first` has already broken: same kind, raised at once."""
    message = (
        f"this transport failed earlier and is unusable; start the world anew. The first failure: {words_of(first)}"
    )
    if isinstance(first, CollectiveMismatch):
        return CollectiveMismatch(message, first.calls)
    if isinstance(first, TransportError):
        return type(first)(message, rank=first.rank, peer=first.peer, operation=first.operation)
    return TransportError(message)
