"""Where ranks on several hosts meet: a torch.distributed store, in which each says who and where it is.

Any number of worlds may meet in one store, one after the other: each gets a part of it that nobody has used before.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import socket
import time
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from murmura.errors import MurmuraError, RendezvousError
from murmura.transports.bounded_store import SILENCE, BoundedStore, StoreSilent, part_of
from murmura.transports.error_reporter import ExitNotice, Reporter
from murmura.transports.host import host_identity, number_hosts, pid_namespace
from murmura.transports.liveness import Liveness
from murmura.transports.signed_store import ADVICE, SignedStore
from murmura.transports.watched_store import Watch, nobody, poll, run_watched

log = logging.getLogger("murmura")

Store: TypeAlias = Any  # torch.distributed.Store, whose type torch does not export

LOOPBACK = ("", "localhost", "127.0.0.1", "::1")
PAUSE_SECONDS = 0.05  # between two tries to reach a store that is not there yet
PROBE_SECONDS = 1.0  # for a connection to be made
SILENT_SECONDS = 5.0  # after which a store that does not answer, though its port does, is spoken of
GRACE_SECONDS = 2.0  # for a rank to write again what a stranger has overwritten
LOOK_SECONDS = 0.25  # between two looks whether one has


# The store


def serve_store(host: str, port: int, world_size: int, timeout: float) -> Store | None:
    """A TCP store of this process at host:port, for this host alone if it is a loopback; None if the port is taken."""
    limit = timedelta(seconds=timeout)
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    if host not in LOOPBACK:
        if answers(host, port):  # torch complains loudly if one tries to serve it, too
            return None
        try:
            return make(host, port, world_size, True, limit, wait_for_workers=False)
        except dist.DistNetworkError:  # the port was taken meanwhile, or is on another host
            return None
    # Torch itself would listen on every interface.
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host or "127.0.0.1", port))
            listener.listen(1024)
        except OSError:
            return None
        fd = listener.detach()  # it belongs to the store from here on
    return make(host or "127.0.0.1", port, world_size, True, limit, wait_for_workers=False, master_listen_fd=fd)


def reach_store(
    host: str, port: int, rank: int, timeout: float, watch: Watch = nobody, *, caller: str = "rank"
) -> Store:
    """The TCP store that another process serves at host:port; raises what `watch` finds meanwhile.

    `rank` is the number of the `caller`, which is a rank, or the launcher of a host.
    """
    deadline = time.monotonic() + timeout
    while not answers(host, port, max(0.01, min(PROBE_SECONDS, deadline - time.monotonic()))):
        error = watch()
        if error is not None:
            raise error
        if time.monotonic() + PAUSE_SECONDS > deadline:
            raise RendezvousError(
                f"{caller} {rank} did not reach the store of {caller} 0 at {host}:{port} within {timeout:.1f} s. Was "
                "it started, with the same address, and is the port open between the hosts?",
                (0,),
            )
        time.sleep(PAUSE_SECONDS)  # nothing to wait on: nobody listens yet
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    seconds = max(0.5, deadline - time.monotonic())
    greet = functools.partial(make, host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)
    told_at = time.monotonic() + SILENT_SECONDS

    def silent(waited: float) -> str:
        return (
            f"a program listens at {host}:{port} and has not answered {caller} {rank} for {waited:.1f} s. If it is no "
            "store of torch's, choose another port, on all ranks. If it is one, it looks up the name of each client: "
            "see that the name server of its host answers, or list the clients in its /etc/hosts."
        )

    def watch_and_tell() -> Exception | None:
        nonlocal told_at
        if time.monotonic() > told_at:
            log.warning("%s", silent(SILENT_SECONDS))
            told_at = deadline
        return watch()

    try:  # in a thread, because torch waits for the greeting of whoever listens there without end
        return run_watched(greet, seconds, watch_and_tell)
    except TimeoutError:
        raise RendezvousError(silent(seconds), (0,)) from None
    except (dist.DistError, RuntimeError) as error:
        raise RendezvousError(
            f"{caller} {rank} lost the store of {caller} 0 at {host}:{port} just when it had reached it. (torch says: "
            f"{error})",
            (0,),
        ) from error


def answers(host: str, port: int, seconds: float = PROBE_SECONDS) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection((host or "127.0.0.1", port), seconds).close()
    except OSError:
        return False
    return True


def file_store(path: str, world_size: int) -> Store:
    """A store in a file that processes of one host share; it needs no port."""
    make: Any = dist.FileStore  # type: ignore[attr-defined]
    return make(path, world_size)


def under(store: Store, prefix: str) -> Store:
    """The part of `store` whose keys begin with `prefix`."""
    if isinstance(store, SignedStore):
        return store.under(prefix)
    return part_of(store, prefix)


def bounded(store: Store) -> Store:
    """`store`, which keeps nobody waiting if whoever serves it is stopped or gone; see `BoundedStore`."""
    if isinstance(store, SignedStore):
        return store.bounded()
    return store if isinstance(store, BoundedStore) else BoundedStore(store)


# Signing in


class StoreLost(RendezvousError):
    """Whoever serves the store closed it while the ranks were signing in."""


@dataclass(frozen=True)
class Roster:
    """Who and where the ranks of a world are, and the part of the store that is this world's alone."""

    rank: int
    hosts: tuple[int, ...]
    pids: dict[int, int]  # of the peers that this process can watch
    store: Store
    world_ranks: tuple[int, ...]  # what the ranks are called in the world that this is a part of
    token: str  # of this rendezvous alone
    claims: tuple[str, ...]  # what each rank said of itself


@dataclass(frozen=True)
class _Entry:
    """What a rank says of itself: `answers` is the token of the rendezvous it answers."""

    answers: str
    nonce: str
    host: str
    pid_namespace: str
    pid: int
    claim: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(astuple(self)).encode()

    @classmethod
    def read(cls, told: Any) -> _Entry:
        """Raises ValueError for anything else."""
        if not isinstance(told, list) or [type(each) for each in told] != [str, str, str, str, int, str]:
            raise ValueError("not an entry")
        return cls(*told)


def sign_in(
    store: Store,
    rank: int,
    world_size: int,
    timeout: float,
    reporter: Reporter | None = None,
    watch: Watch = nobody,
    claim: str = "",
) -> Roster:
    """Say that this rank is here and wait for all others; `RendezvousError` names those that do not come.

    Rank 0 opens a rendezvous under a token that nobody has used, the others answer it, and rank 0 publishes who came.
    An answer holds a number that only its rank knows, so nothing that an earlier rendezvous left in the store is taken
    for this one. `watch` tells of ranks that cannot come any more. `claim` is told to all ranks.
    """
    store = bounded(store)
    reporter = reporter or Reporter(rank, range(world_size))
    rendezvous = _Rendezvous(store, rank, world_size, timeout, reporter, watch, claim)
    try:
        with contextlib.closing(rendezvous.liveness):
            token, entries = rendezvous.hold() if rank == 0 else rendezvous.attend()
    except dist.DistError as error:
        raise StoreLost(
            f"rank {rank} lost the store while the ranks were signing in. Whoever serves it, rank 0 or a launcher, has "
            f"ended: its own output says why. (torch says: {error})",
            (0,),
        ) from error
    own = entries[rank].pid_namespace
    pids = {each: entry.pid for each, entry in enumerate(entries) if entry.pid_namespace == own and each != rank}
    hosts = tuple(number_hosts([entry.host for entry in entries]))
    claims = tuple(entry.claim for entry in entries)
    return Roster(rank, hosts, pids, under(store, token), reporter.world_ranks, token, claims)


class _Rendezvous:
    def __init__(
        self, store: Store, rank: int, world_size: int, timeout: float, reporter: Reporter, watch: Watch, claim: str
    ) -> None:
        self._store, self._rank, self._world_size, self._timeout = store, rank, world_size, timeout
        self._reporter, self._watch = reporter, watch
        self._own = _Entry("", secrets.token_hex(8), host_identity(), pid_namespace(), os.getpid(), claim)
        self._unreadable: dict[str, float] = {}  # since when, by key
        self._looked = 0.0
        self.liveness = Liveness({})

    def hold(self) -> tuple[str, list[_Entry]]:
        """As rank 0."""
        own = replace(self._own, answers=secrets.token_hex(8))
        came = {0: own}
        self._store.set("rendezvous", own.to_bytes())

        def all_came() -> bool:
            self._keep("rendezvous", own)
            for peer in range(self._world_size):
                if peer not in came:
                    entry = self._entry(f"here/{peer}", peer)
                    if entry is not None and entry.answers == own.answers:
                        came[peer] = entry
                        self._attend_to(peer, entry)
            return len(came) == self._world_size

        published = f"roster/{own.answers}"
        try:
            if not poll(all_came, self._timeout, self._look_for_deaths):
                raise self._missing([peer for peer in range(self._world_size) if peer not in came])
        except RendezvousError as error:  # the others learn it now, not at their deadline
            self._store.set(published, json.dumps({"refused": str(error), "missing": error.missing}))
            raise
        except MurmuraError as error:
            self._store.set(published, ExitNotice.of(error, self._reporter.own).to_bytes(4096))
            raise
        entries = [came[peer] for peer in range(self._world_size)]
        self._store.set(published, json.dumps([json.loads(entry.to_bytes()) for entry in entries]))
        return own.answers, entries

    def attend(self) -> tuple[str, list[_Entry]]:
        """As any other rank."""
        own, key = self._own, f"here/{self._rank}"
        self._store.set(key, own.to_bytes())
        tokens: list[str] = []  # of the rendezvous answered: earlier ones, then the one that is held now
        found: list[tuple[str, list[_Entry]]] = []

        def is_over() -> bool:
            nonlocal own
            opened = self._entry("rendezvous", 0)
            # Before a newer rendezvous is answered: the one we came to may have ended, and that is the next.
            for token in tokens:
                entries = self._roster(token)
                if entries is not None and entries[self._rank].nonce == own.nonce:
                    found.append((token, entries))
                    return True
            if opened is not None and opened.answers not in tokens:
                tokens.append(opened.answers)
                own = replace(own, answers=opened.answers)
                self._store.set(key, own.to_bytes())
                self._attend_to(0, opened)
            self._keep(key, own)
            return False

        if not poll(is_over, self._timeout, self._look_for_deaths):
            entries = {peer: self._entry(f"here/{peer}", peer) for peer in range(1, self._world_size)}
            absent = [peer for peer, each in entries.items() if each is None or each.answers != own.answers]
            raise self._missing(absent if tokens and absent else [0, *(peer for peer in absent if not tokens)])
        return found[0]

    def _roster(self, token: str) -> list[_Entry] | None:
        told = self._get(f"roster/{token}")
        if told is None:
            return None
        if (notice := ExitNotice.from_bytes(told)) is not None:
            raise notice.as_error(self._reporter.own, self._reporter.world_rank(0), "the rendezvous")
        try:
            said = json.loads(told)
            if isinstance(said, dict) and "refused" in said:
                missing = tuple(int(rank) for rank in said["missing"])
                raise RendezvousError(f"rank {self._reporter.own} was refused: {said['refused']}", missing)
            entries = [_Entry.read(each) for each in said]
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return entries if len(entries) == self._world_size else None

    def _get(self, key: str) -> bytes | None:
        """None if there is nothing, or nothing that a rank of this job has written, or nothing that comes in time."""
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else None
        except StoreSilent:
            return None
        except RendezvousError:
            self._unreadable.setdefault(key, time.monotonic())
            return None

    def _entry(self, key: str, peer: int) -> _Entry | None:
        told = self._get(key)
        if told is not None:
            try:
                entry = _Entry.read(json.loads(told))
            except (ValueError, RecursionError):
                self._unreadable.setdefault(key, time.monotonic())
            else:
                self._unreadable.pop(key, None)
                return entry
        since = self._unreadable.get(key)
        if since is not None and time.monotonic() - since > min(GRACE_SECONDS, self._timeout / 2):
            own, other = self._reporter.own, self._reporter.world_rank(peer)
            raise RendezvousError(
                f"rank {own} cannot read the entry of rank {other} in the store. Was one of them started with a "
                f"secret, and the other with none or another? {ADVICE}",
                (other,),
            )
        return None

    def _keep(self, key: str, own: _Entry) -> None:
        """Look from time to time whether what this rank said still stands; say it again if a stranger wrote there."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        told = self._get(key)
        self._unreadable.pop(key, None)
        if told == own.to_bytes():
            return
        try:
            other = None if told is None else _Entry.read(json.loads(told))
        except (ValueError, RecursionError):
            other = None
        if other is not None:
            raise RendezvousError(
                f"rank {self._reporter.own} found that another process (pid {other.pid}) signs in as the same rank. Do "
                "two jobs meet at this address? Give each its own coordinator_addr, or its own job_id."
            )
        self._store.set(key, own.to_bytes())

    def _attend_to(self, peer: int, entry: _Entry) -> None:
        if entry.pid_namespace == self._own.pid_namespace:
            self.liveness.add(peer, entry.pid)

    def _look_for_deaths(self) -> Exception | None:
        dead = self.liveness.dead()
        error = self._watch()  # after that: a rank which failed because of another has said so before it ended
        return error or (self._reporter.lost(dead[0], "the rendezvous") if dead else None)

    def _missing(self, peers: list[int]) -> RendezvousError:
        missing = self._reporter.names(peers)
        return RendezvousError(
            f"rank {self._reporter.own} waited {self._timeout:.1f} s, but of {self._world_size} ranks {missing} did "
            "not come. Were they started, with the same coordinator address and world size?"
            + (f" {SILENCE.capitalize()}." if self._store.is_silent else ""),
            tuple(missing),
        )
