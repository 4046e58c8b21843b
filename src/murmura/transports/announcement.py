"""Announcement: a rank of one host says which transport it was told to take, where ranks that took another see it.

Shared memory meets at a socket and process groups meet in a store, so ranks that were told different things would wait
for each other at two places. While a rank waits, an abstract Unix socket holds its choice in its name: no file, no
port, and gone with the process. A rank that finds another choice fails, instead of waiting until its deadline.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import time
from types import TracebackType
from typing import Self

from murmura.errors import ConfigError, RendezvousError, TransportError
from murmura.transports.choice import Claim, disagreement
from murmura.transports.shared_memory.rendezvous import peer_ids, socket_address
from murmura.transports.watched_store import nobody, poll
from murmura.types import TransportKind

LOOK_SECONDS = 0.2  # between two looks at what the others announce
STAY_SECONDS = 1.5  # at most, that a rank which found another choice stays, so that the others find its own
SEEN = "seen"  # announced by a rank that has found another choice

_NUM_CONNECTIONS: collections.Counter[tuple[str, int]] = collections.Counter()
"""How often each rank of a job has connected: a rank that is late with one must not look at another's next."""


class Announcement:
    """What rank `rank` of `job` was told; a context manager that lasts as long as the rank waits for the others."""

    def __init__(self, job: str, rank: int, world_size: int, claim: Claim) -> None:
        self._claim, self._rank, self._world_size = claim, rank, world_size
        _NUM_CONNECTIONS[job, rank] += 1
        self._job = f"{job}#{_NUM_CONNECTIONS[job, rank]}"
        self._looked = time.monotonic()
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._announce(self._claim.transport)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, RendezvousError | TransportError):  # perhaps of a rank that found it first, and left
                self._looked = 0.0
                found = self.watch()
                if found is not None:
                    raise found from error
        finally:
            for each in self._sockets:
                each.close()

    def watch(self) -> ConfigError | None:
        """The error to raise if a rank has announced another choice; it looks every LOOK_SECONDS.

        Before it returns an error, the other ranks that are here have found it, too.
        """
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return None
        self._looked = time.monotonic()
        claims = {self._rank: self._claim}

        def look() -> dict[int, Claim]:
            """The ranks that stand here now; all that ever did stay in `claims`."""
            here = {
                rank: Claim(kind)
                for rank in range(self._world_size)
                for kind in TransportKind
                if rank != self._rank and self._stands(rank, kind)
            }
            claims.update(here)
            return here

        if all(claim.transport is self._claim.transport for claim in look().values()):
            return None
        self._announce(SEEN)
        poll(lambda: all(self._stands(rank, SEEN) for rank in look()), STAY_SECONDS, nobody)
        return disagreement([claims.get(rank) for rank in range(self._world_size)])

    def _announce(self, what: str) -> None:
        own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sockets.append(own)
        with contextlib.suppress(OSError):  # held by a second process of the same rank, which the rendezvous refuses
            own.bind(self._address(self._rank, what))
            own.listen(self._world_size)

    def _stands(self, rank: int, what: str) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            try:
                probe.connect(self._address(rank, what))
            except BlockingIOError:  # it stands, and many have looked
                return True
            except OSError:
                return False
            return peer_ids(probe)[1] == os.getuid()

    def _address(self, rank: int, what: str) -> str:
        return f"{socket_address(f'{self._job}:{rank}')}:{what}"
