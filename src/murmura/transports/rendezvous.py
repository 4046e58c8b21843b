"""Where ranks on several hosts meet: a torch.distributed store, in which each says who and where it is.

The store also keeps what a rank has to say at its end, so that a broken connection gets a name and a reason.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from murmura.errors import CollectiveMismatch, RendezvousError, TransportError, UsageError
from murmura.transports.failures import Departure, mismatch, peer_lost, peer_timeout
from murmura.transports.host import Liveness, host_identity, number_hosts
from murmura.transports.signed_store import ADVICE, SignedStore

Store: TypeAlias = Any  # torch.distributed.Store, whose type torch does not export

POLL_SECONDS = 0.01
PROBE_SECONDS = 1.0
ROLL_CALL_SECONDS = 2.0  # how long a rank that met a failure waits for the others to say what they know


def open_store(host: str, port: int, rank: int, world_size: int, timeout: float) -> Store:
    """The TCP store at host:port; rank 0 serves it, unless a launcher on its host already does."""
    limit = timedelta(seconds=timeout)

    def tcp_store(is_master: bool) -> Store:
        make: Any = dist.TCPStore  # type: ignore[attr-defined]
        return make(host, port, world_size, is_master, limit, wait_for_workers=False)

    try:
        if rank == 0 and not _is_served(host, port):
            try:
                return tcp_store(True)
            except dist.DistNetworkError:  # the port was taken meanwhile, or is on another host
                pass
        return tcp_store(False)
    except dist.DistError as error:
        raise RendezvousError(
            f"rank {rank} did not reach the store of rank 0 at {host}:{port} within {timeout:.1f} s. Is it running, "
            f"and is the port open between the hosts? (torch says: {error})",
            (0,),
        ) from error


def _is_served(host: str, port: int) -> bool:
    """Whether somebody listens there: a launcher with its own store. (Torch complains loudly if one tries to, too.)"""
    try:
        socket.create_connection((host, port), PROBE_SECONDS).close()
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
    make: Any = dist.PrefixStore  # type: ignore[attr-defined]
    return make(prefix, store)


@dataclass(frozen=True)
class Roster:
    """Who and where the ranks of a world are."""

    rank: int
    hosts: tuple[int, ...]
    pids: dict[int, int]  # of the peers on this host


def sign_in(store: Store, rank: int, world_size: int, timeout: float) -> Roster:
    """Say that this rank is here and wait for all others; `RendezvousError` names those that do not come."""
    try:
        store.set(f"here/{rank}", json.dumps([host_identity(), os.getpid()]))
        _await_all(store, "here", rank, world_size, timeout)
        entries = [_read_entry(store, rank, each) for each in range(world_size)]
    except dist.DistError as error:
        raise RendezvousError(
            f"rank {rank} lost the store while the ranks were signing in. Whoever serves it, rank 0 or a launcher, has "
            f"ended: its own output says why. (torch says: {error})",
            (0,),
        ) from error
    own_host = entries[rank][0]
    pids = {each: pid for each, (host, pid) in enumerate(entries) if host == own_host and each != rank}
    return Roster(rank, tuple(number_hosts([host for host, _ in entries])), pids)


def _read_entry(store: Store, rank: int, peer: int) -> tuple[str, int]:
    try:
        host, pid = json.loads(store.get(f"here/{peer}"))
        return str(host), int(pid)
    except (ValueError, TypeError) as error:
        raise RendezvousError(
            f"rank {rank} cannot read what stands for rank {peer} in the store. Was rank {peer} started with a secret, "
            f"and rank {rank} without? {ADVICE}",
            (peer,),
        ) from error


def _await_all(store: Store, what: str, rank: int, world_size: int, timeout: float) -> None:
    """Wait until every rank has said `what`."""
    deadline = time.monotonic() + timeout
    missing = list(range(world_size))
    while missing := [each for each in missing if not store.check([f"{what}/{each}"])]:
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"rank {rank} waited {timeout:.1f} s, but of {world_size} ranks {missing} did not come. "
                "Were they started, with the same coordinator address and world size?",
                tuple(missing),
            )
        time.sleep(POLL_SECONDS)  # a store has no wait that names who is missing


class Diary:
    """What the ranks of one channel leave word of in the store."""

    def __init__(self, store: Store, rank: int, world_size: int, liveness: Liveness) -> None:
        self._store = store
        self._rank = rank
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._liveness = liveness

    def depart(self, departure: Departure) -> None:
        """Say why this rank can no longer be waited for; must be said before its connections close."""
        self._set(f"departed/{self._rank}", departure.to_bytes(4096))

    def cause(self, operation: str) -> TransportError | CollectiveMismatch | None:
        """The error that a departure or a death means to this rank in `operation`, if one is known by now."""
        dead = self._liveness.dead()  # first, so that the word of whoever left one is found below
        departed = {peer: Departure.from_bytes(text) for peer, text in self._read("departed").items()}
        for peer in dead:
            if peer not in departed:
                return peer_lost(self._rank, peer, operation, "died: it was killed, or exited without closing")
        first_hand = {peer: each for peer, each in departed.items() if each.culprit is None} or departed
        for peer, departure in first_hand.items():
            return departure.as_error(self._rank, peer, operation)
        return None

    def explain(
        self, call: str, operation: str, waited: float, *, awaited: Sequence[int], timed_out: bool, told: object
    ) -> TransportError | CollectiveMismatch:
        """Ask around after a failure in `call`, when this rank had waited for `awaited`; `told` is what torch said.

        Returns at once when a departure or a death explains it; else when all have said what they were calling, or
        after `ROLL_CALL_SECONDS`.
        """
        self._set(f"stalled/{self._rank}", call.encode())
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        while True:
            if (cause := self.cause(operation)) is not None:
                return cause
            calls = {peer: text.decode() for peer, text in self._read("stalled").items()}
            if time.monotonic() > deadline or len(calls) == len(self._peers):
                break
            time.sleep(POLL_SECONDS)
        silent = [peer for peer in awaited if peer not in calls]
        if silent and timed_out:
            return peer_timeout(self._rank, silent, operation, waited)
        if silent:
            return peer_lost(self._rank, silent[0], operation, f"does not answer (torch says: {told})")
        if any(each != call for each in calls.values()):
            return mismatch(self._rank, operation, {**calls, self._rank: call})
        state = "They wait too: is the network between the ranks up?"
        return peer_timeout(self._rank, sorted(calls), operation, waited, state)

    def _set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value)
        except (dist.DistError, RuntimeError):
            return  # the store went with the rank that served it; nobody can be told

    def _read(self, what: str) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        try:
            for peer in self._peers:
                if self._store.check([f"{what}/{peer}"]):
                    found[peer] = self._store.get(f"{what}/{peer}")
        except (dist.DistError, RuntimeError):
            return found
        return found


def build_group(store: Store, rank: int, world_size: int, backend: str, timeout: float, roster: Roster) -> Any:
    """A process group of one's own on `store`; returns when all ranks have connected.

    A rank that went ahead, did its part and closed would otherwise break the connections that others still make.
    """
    try:
        group = _make_group(under(store, "group"), rank, world_size, backend, timeout, roster)
    except RuntimeError as error:
        if isinstance(error, UsageError):
            raise
        raise RendezvousError(
            f"rank {rank} could not connect to all others over {backend}: {error} Did one of them fail meanwhile? "
            "`murmura doctor` looks at the network."
        ) from error
    store.set(f"connected/{rank}", b"")
    _await_all(store, "connected", rank, world_size, timeout)
    return group


def _make_group(store: Store, rank: int, world_size: int, backend: str, timeout: float, roster: Roster) -> Any:
    limit = timedelta(seconds=timeout)
    if backend == "gloo":
        if len(set(roster.hosts)) > 1:
            return dist.ProcessGroupGloo(store, rank, world_size, limit)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = limit
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        return gloo(store, rank, world_size, options)
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, world_size, nccl)
    raise UsageError(
        f"murmura builds gloo and nccl groups, not {backend!r}. Build it yourself and hand it over: "
        "ProcessGroupTransport(group, store=store)."
    )
