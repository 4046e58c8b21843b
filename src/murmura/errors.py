"""Every exception murmura raises, in one tree; each message ends with what to do about it.

    MurmuraError
    ├── ConfigError (ValueError)          a setting is wrong; every fault is listed at once
    ├── RendezvousError                   ranks did not find each other; names the missing ones
    ├── TransportError                    an exchange failed; the transport is poisoned afterwards
    │   ├── PeerTimeout (TimeoutError)    a peer is alive but did not come in time
    │   ├── PeerLost (ConnectionError)    a peer died, left or failed
    │   └── TransportClosed               this rank closed the transport itself
    ├── CollectiveMismatch                ranks called different operations; holds the table of who called what
    ├── ReplicaDivergence                 replicas that must be equal are not
    ├── NonFiniteGradient                 a gradient holds an infinity or a NaN
    ├── CheckpointError                   a checkpoint could not be written or read, on whichever rank
    └── UsageError (RuntimeError)         the call itself makes no sense

After a TransportError or a CollectiveMismatch the contents of the tensors involved are undefined. The functions at the
end write the texts of those errors, with the numbers of the ranks: always ranks of the world.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "CheckpointError",
    "CollectiveMismatch",
    "ConfigError",
    "MurmuraError",
    "NonFiniteGradient",
    "PeerLost",
    "PeerTimeout",
    "RendezvousError",
    "ReplicaDivergence",
    "TransportClosed",
    "TransportError",
    "UsageError",
]


class MurmuraError(Exception):
    """The base of all errors raised by murmura."""

    is_unheard = False
    """Whether no call has raised it yet: it was found after its operation had returned, as on a GPU."""


class ConfigError(MurmuraError, ValueError):
    """One or more settings are wrong; the message lists all of them."""


class RendezvousError(MurmuraError):
    """The ranks of a world did not find each other in time.

    Attributes:
        missing: the ranks that never came.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class TransportError(MurmuraError):
    """An exchange between ranks failed. Ranks are those of the world, also on a channel of fewer ranks.

    Attributes:
        rank: the rank that raises.
        peer: the rank at fault, if one can be named.
        operation: the operation that failed, with its number on the channel: "all_reduce #12".
        cause: what a transport knows of the root cause and tells its peers; None if it made no such record.
    """

    cause: object = None

    def __init__(
        self, message: str, *, rank: int | None = None, peer: int | None = None, operation: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.operation = operation


class PeerTimeout(TransportError, TimeoutError):
    """A peer that still lives did not arrive before the deadline."""


class PeerLost(TransportError, ConnectionError):
    """A peer died, left the world, or failed in its own program.

    Attributes:
        left: whether it closed its transport in good order, so that nothing has failed.
    """

    left = False


class TransportClosed(TransportError):
    """The transport was closed by this rank before the call."""


class CollectiveMismatch(MurmuraError):
    """Ranks met in one collective with different operations, dtypes or shapes.

    Attributes:
        calls: what each rank called, by rank of the world.
    """

    def __init__(self, message: str, calls: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.calls = calls or {}


class ReplicaDivergence(MurmuraError):
    """Replicas that must hold the same values do not."""


class NonFiniteGradient(MurmuraError):
    """A gradient holds an infinity or a NaN."""


class CheckpointError(MurmuraError):
    """A checkpoint could not be written or read on some rank; raised on all of them.

    Attributes:
        rank: the rank where it failed, if one can be named.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class UsageError(MurmuraError, RuntimeError):
    """The call makes no sense as it stands; the message says which call does."""


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 1, 2 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _in(operation: str) -> str:
    return f" in {operation}" if operation else ""


def peer_timeout(rank: int, awaited: Sequence[int], operation: str, waited: float, state: str = "") -> PeerTimeout:
    """The error of `rank`, which waited for ranks that live but did not come; `state` says what is known of them."""
    return PeerTimeout(
        f"rank {rank} waited {waited:.1f} s for {name_ranks(awaited)}{_in(operation)}. {state}"
        f"{' ' if state else ''}If they are only slow, raise the timeout (DistributedConfig.timeout, or timeout= of "
        "the call); if they are stuck, look at what they do (py-spy dump --pid PID).",
        rank=rank,
        peer=awaited[0],
        operation=operation or None,
    )


def peer_lost(rank: int, peer: int, operation: str, story: str) -> PeerLost:
    """The error of `rank`, which needs `peer`; `story` says what became of that: "raised ValueError: …"."""
    return PeerLost(
        f"rank {rank} lost rank {peer}{_in(operation)}: rank {peer} {story.removesuffix('.')}. "
        f"Look at rank {peer}'s own output for the cause; this transport is unusable, so start the world anew.",
        rank=rank,
        peer=peer,
        operation=operation or None,
    )


def mismatch(rank: int, operation: str, calls: Mapping[int, str]) -> CollectiveMismatch:
    """The table of who called what; ranks that did not say are listed as such."""
    rows = "\n".join(f"  rank {each}: {call}" for each, call in sorted(calls.items()))
    return CollectiveMismatch(
        f"rank {rank}: the ranks disagree in {operation}:\n{rows}\n"
        "Every rank must call the same operations in the same order, with the same dtype and shape.",
        dict(calls),
    )
