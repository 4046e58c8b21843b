"""The `Reporter` puts rank numbers into the errors of a transport, and an `ExitNotice` tells the peers of a failure.

Every number in them, in texts and in fields, is a rank of the world, also on a channel of fewer ranks: a `Reporter`
is given the ranks of its channel and names those of the world. A rank that leaves or fails gives its peers an
`ExitNotice`: the root cause, which a rank that fails because of another passes on unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from murmura.errors import (
    CheckpointError,
    CollectiveMismatch,
    MurmuraError,
    PeerLost,
    PeerTimeout,
    TransportClosed,
    TransportError,
    mismatch,
    name_ranks,
    peer_lost,
    peer_timeout,
)
from murmura.transports.stalls import StallNotes, at_fault

__all__ = ["DIED", "ExitNotice", "Reporter", "words_of"]

DIED = "died: it was killed, or exited without closing"
KINDS = ("left", "raised", "lost", "timeout", "mismatch")


def words_of(error: BaseException) -> str:
    """Kind and message of any exception, also of one whose own __str__ fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # whatever its own __str__ raises
        return f"{type(error).__name__} (its message cannot be read)"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, what it was raised from or in answer to, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ if error.__suppress_context__ else error.__cause__ or error.__context__


_NOT_EVERY_RANK = (
    ", without an error. Does every rank call this? "
    "Averages, checkpoints and other collectives belong outside of `if rank == 0:`"
)


@dataclass(frozen=True)
class ExitNotice:
    """Why a rank can no longer be waited for; its peers raise this cause instead of a guess."""

    culprit: int  # the rank at fault; of a mismatch, the rank that tells
    story: str = "closed its transport and left"  # what became of the culprit; of a time-out, what the witness did
    kind: str = "left"  # one of KINDS
    witness: int | None = None  # who noticed it first, if that was not the culprit
    calls: dict[str, str] = field(default_factory=dict)  # of a mismatch, by rank

    @classmethod
    def of(cls, error: BaseException, rank: int) -> ExitNotice:
        """The notice of a rank that failed with `error`; an error that another rank caused passes on its notice."""
        for each in _chain(error):
            if isinstance(each, CollectiveMismatch):
                calls = {str(other): call for other, call in each.calls.items()}
                return cls(rank, f"raised {words_of(each)}", "mismatch", calls=calls)
            if isinstance(each, TransportError) and isinstance(each.cause, ExitNotice):
                notice = each.cause
                return replace(notice, kind="lost") if notice.kind == "left" else notice
            if isinstance(each, PeerTimeout | PeerLost) and each.peer not in (None, rank):
                kind = "timeout" if isinstance(each, PeerTimeout) else "lost"
                return cls(each.peer, f"raised {words_of(each)}", kind, rank)
            if isinstance(each, CheckpointError) and each.rank is not None:  # which all raise for the failure of one
                return cls(each.rank, f"raised {words_of(each)}", "raised", rank)
        return cls(rank, f"raised {words_of(error)}", "raised")

    def as_error(
        self, rank: int, peer: int, operation: str, waited: float = 0.0
    ) -> TransportError | CollectiveMismatch:
        """The error that `rank` raises because `peer`, which it waits for, exited as told here."""
        if self.kind == "mismatch":
            return mismatch(rank, operation, {int(each): call for each, call in self.calls.items()})
        witness = peer if self.witness is None else self.witness
        error: TransportError
        if self.culprit == rank:  # the others gave up on it
            told = self.story if self.kind == "timeout" else f"gave up on rank {rank}, which {self.story}"
            error = peer_lost(rank, witness, operation, told)
        elif self.kind == "timeout":
            first = f"Rank {witness} gave up on it first." if witness not in (rank, self.culprit) else ""
            error = peer_timeout(rank, [self.culprit], operation, waited, first)
        elif self.kind == "lost" and self.story.startswith("raised Peer"):
            error = peer_lost(rank, self.culprit, operation, f"was lost to rank {witness} before, which {self.story}")
        else:
            why = _NOT_EVERY_RANK if self.story == ExitNotice.story else ""  # also of one that another rank passed on
            error = lost = peer_lost(rank, self.culprit, operation, self.story + why)
            lost.left = self.kind == "left"
        error.cause = self
        return error

    def to_bytes(self, limit: int) -> bytes:
        """As JSON of at most `limit` bytes; a long story loses its end."""
        notice = self
        while len(encoded := json.dumps(asdict(notice)).encode()) > limit:
            notice = replace(notice, story=notice.story[: len(notice.story) * 3 // 4], calls={})
        return encoded

    @classmethod
    def from_bytes(cls, encoded: bytes) -> ExitNotice | None:
        """None for anything that `to_bytes` has not written: whoever reaches the store can write there."""
        try:
            told = json.loads(encoded)
            notice = cls(**told)
            calls = {str(int(rank)): str(call) for rank, call in notice.calls.items()}
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        witness_known = notice.witness is None or type(notice.witness) is int
        texts = isinstance(notice.story, str) and notice.kind in KINDS
        if type(notice.culprit) is not int or not witness_known or not texts:
            return None
        return replace(notice, calls=calls)


class Reporter:
    """Makes the errors of one rank of a channel; it is given ranks of the channel and names those of the world."""

    def __init__(self, rank: int, world_ranks: Sequence[int]) -> None:
        self.world_ranks = tuple(world_ranks)
        self.world_size = len(self.world_ranks)
        self.own = self.world_ranks[rank]

    def world_rank(self, peer: int) -> int:
        return self.world_ranks[peer]

    def names(self, peers: Sequence[int]) -> list[int]:
        """The ranks of the world that `peers` are, each once."""
        return list(dict.fromkeys(self.world_ranks[peer] for peer in peers))

    def lost(self, peer: int, operation: str, story: str = DIED) -> PeerLost:
        """`story` says what became of `peer`: "raised ValueError: …"."""
        culprit = self.world_rank(peer)
        error = peer_lost(self.own, culprit, operation, story)
        error.cause = ExitNotice(culprit, story, "lost", self.own)
        return error

    def timed_out(
        self, awaited: Sequence[int], operation: str, waited: float, state: str = "", notes: StallNotes | None = None
    ) -> PeerTimeout:
        """`awaited` live but did not come; `state` says what is known of them, `notes` whom they wait for."""
        names = self.names(awaited)
        guilty = names if notes is None else at_fault(names, notes.awaited_by, self.own)
        if guilty != names:
            state = f"This rank needs {name_ranks(names)} in it, and those wait themselves."
        error = peer_timeout(self.own, guilty, operation, waited, state)
        assert error.peer is not None
        error.cause = ExitNotice(error.peer, f"raised {words_of(error)}", "timeout", self.own)
        return error

    def peer_exited(
        self, notice: ExitNotice, peer: int, operation: str, waited: float = 0.0
    ) -> TransportError | CollectiveMismatch:
        """`peer`, which this rank waits for, has said why it cannot be waited for."""
        return notice.as_error(self.own, self.world_rank(peer), operation, waited)

    def mismatch(self, operation: str, calls: Mapping[int, str]) -> CollectiveMismatch:
        """The table of who called what, by rank of the channel."""
        return mismatch(self.own, operation, {self.world_rank(peer): call for peer, call in calls.items()})

    def closed(self, operation: str) -> TransportClosed:
        """This rank closed the transport while `operation` was under way."""
        words = f"rank {self.own} closed the transport during {operation}."
        return TransportClosed(words, rank=self.own, operation=operation or None)

    def aborted(
        self, failure: BaseException, operation: str, waited: float = 0.0
    ) -> TransportError | CollectiveMismatch:
        """Another thread of this rank aborted the transport with `failure` while `operation` was under way."""
        if isinstance(failure, TransportError) and isinstance(failure.cause, ExitNotice):
            witness = failure.cause.culprit if failure.cause.witness is None else failure.cause.witness
            return failure.cause.as_error(self.own, witness, operation, waited)
        return self.again(failure, operation)

    def again(self, first: BaseException, operation: str = "") -> TransportError | CollectiveMismatch:
        """The error of a call on a transport that `first` has already broken: same kind, raised at once."""
        if isinstance(first, MurmuraError):
            first.is_unheard = False
        message = (
            f"this transport failed earlier and is unusable; start the world anew. The first failure: {words_of(first)}"
        )
        if isinstance(first, CollectiveMismatch):
            return CollectiveMismatch(message, first.calls)
        if not isinstance(first, TransportError):
            return TransportError(message, rank=self.own, operation=operation or None)
        rank = self.own if first.rank is None else first.rank
        error = type(first)(message, rank=rank, peer=first.peer, operation=first.operation or operation or None)
        error.cause = first.cause
        return error
