"""FailureLog: what the ranks of one channel write into the store about failures, so that a broken connection becomes
an error with a rank and a reason.

Whoever reaches the store can write there; entries that no rank can have written are ignored. If the process that
serves the store is stopped or gone, failures are explained without it, after a moment.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch.distributed as dist

from murmura.collectives.deadline import Deadline
from murmura.errors import CollectiveMismatch, RendezvousError, TransportError
from murmura.transports.bounded_store import ANSWER_SECONDS, SILENCE
from murmura.transports.error_reporter import ExitNotice, Reporter
from murmura.transports.liveness import Liveness
from murmura.transports.rendezvous import Store, bounded
from murmura.transports.stalls import StallNotes, is_recent

POLL_SECONDS = 0.01
FEW_SECONDS, MOST_SECONDS = 0.8, 2.0
_ORDER = ("raised", "died", "mismatch", "lost", "timeout", "left")  # the more likely cause of the others first


def roll_call_seconds(waited: float) -> float:
    """How long a rank that met a failure waits for what the others know; short beside the wait that failed."""
    return min(MOST_SECONDS, FEW_SECONDS + 0.08 * waited)


def is_timeout(error: Exception) -> bool:
    """Whether an error of torch's says that a time was up."""
    return "imed out" in str(error) or "imeout" in str(error)


class FailureLog:
    """Exit notices and stalled calls of the ranks of a channel; errors name ranks of the world."""

    def __init__(self, store: Store, rank: int, world_size: int, liveness: Liveness, reporter: Reporter) -> None:
        self._store = bounded(store)
        self._rank = rank
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._liveness = liveness
        self._reporter = reporter
        self.notes: StallNotes = _StoreNotes(self)  # those of the world, if this is the log of a channel

    def announce_exit(self, notice: ExitNotice) -> None:
        """Write why this rank can no longer be waited for; must be written before its connections close."""
        self._set(f"exited/{self._rank}", notice.to_bytes(4096))
        self._set("exited", b"")

    def cause(
        self, operation: str, waited: float = 0.0, among: Sequence[int] | None = None
    ) -> TransportError | CollectiveMismatch | None:
        """The error that an exit notice or a death `among` peers means to this rank in `operation`, if one is known."""
        peers = self._peers if among is None else [peer for peer in self._peers if peer in among]
        dead = self._liveness.dead()  # first, so that the notice of a rank that left one is found below
        entries = self._read("exited", peers) if self._has("exited") else {}
        told = {peer: ExitNotice.from_bytes(text) for peer, text in entries.items()}
        notices = {peer: notice for peer, notice in told.items() if notice is not None}
        kinds = {peer: notice.kind for peer, notice in notices.items()}
        kinds.update({peer: "died" for peer in peers if peer in dead and peer not in notices})
        if not kinds:
            return None
        peer = min(kinds, key=lambda each: _ORDER.index(kinds[each]))
        if kinds[peer] == "died":
            return self._reporter.lost(peer, operation)
        return self._reporter.peer_exited(notices[peer], peer, operation, waited)

    def explain(
        self, call: str, operation: str, waited: float, *, awaited: Sequence[int], timed_out: bool, told: object
    ) -> TransportError | CollectiveMismatch:
        """The error that a failure in `call` means, when this rank had waited for `awaited`; `told` is torch's error.

        Returns at once when an exit notice or a death explains it; else when all have said what they were calling, or
        after `roll_call_seconds`, or without what they would say if the store does not answer.
        """
        if timed_out:
            self.notes.tell(self._reporter.names(awaited))
        self._set(f"stalled/{self._rank}", call.encode())
        deadline = time.monotonic() + roll_call_seconds(waited)
        while True:
            if (cause := self.cause(operation, waited)) is not None:
                return cause
            stalled = self._read("stalled", self._peers)
            calls = {peer: text.decode(errors="replace") for peer, text in stalled.items()}
            if time.monotonic() > deadline or len(calls) == len(self._peers) or self._store.is_silent:
                break
            time.sleep(POLL_SECONDS)
        # Whoever waits in vain too is not at fault; if all that were awaited do, somebody else is.
        silent = [peer for peer in awaited if peer not in calls] or [peer for peer in self._peers if peer not in calls]
        silence = SILENCE if self._store.is_silent else ""
        # Without the store a broken connection may be that of a rank which gave up on a stopped one.
        stopped = self._liveness.stopped() if silent and (timed_out or silence) else []
        stopped = [peer for peer in silent if peer in stopped]
        silent = stopped or silent  # another may be late only because of these
        if silent and (timed_out or stopped):
            state = f"{silence.capitalize()}." if silence else ""
            return self._reporter.timed_out(silent, operation, waited, state, self.notes)
        if silent:
            story = f"does not answer (torch says: {told})" + (f", and {silence}" if silence else "")
            return self._reporter.lost(silent[0], operation, story)
        if any(each != call for each in calls.values()):
            return self._reporter.mismatch(operation, {**calls, self._rank: call})
        state = "They wait too: is the network between the ranks up?"
        return self._reporter.timed_out(sorted(calls), operation, waited, state)

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value)
        except (dist.DistError, RuntimeError):
            return  # the store went with the rank that served it; nobody can be told

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except (dist.DistError, RuntimeError):
            return False

    def _read(self, what: str, peers: Sequence[int]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        deadline = Deadline(ANSWER_SECONDS)  # of all questions together: each of many may take a little less
        for peer in peers:
            if deadline.remaining <= 0:
                break
            try:
                if self._store.check([f"{what}/{peer}"]):
                    found[peer] = self._store.get(f"{what}/{peer}")
            except RendezvousError:
                continue  # written by someone who does not know the job's secret
            except (dist.DistError, RuntimeError):
                return found
        return found


class _StoreNotes:
    """The stall notes of a world, in the store of its failure log, with the time of day, which hosts share."""

    def __init__(self, log: FailureLog) -> None:
        self._log = log

    def tell(self, awaited: Sequence[int]) -> None:
        self._log._set(f"waits/{self._log._reporter.own}", json.dumps([time.time(), *awaited]).encode())

    def awaited_by(self, rank: int) -> Sequence[int]:
        note = self._log._read("waits", [rank]).get(rank, b"")
        try:
            told, *awaited = json.loads(note)
        except (ValueError, TypeError, RecursionError):
            return ()
        if type(told) is not float or not is_recent(told, time.time()):
            return ()
        return [each for each in awaited if type(each) is int]
