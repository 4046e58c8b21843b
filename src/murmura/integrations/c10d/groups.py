"""How the ranks of a process group find their transport.

Ranks meet at the store that torch hands over. A group whose ranks are all in a world that this process has already
joined takes a channel of it; any other joins a world of its own: shared memory on one host, Gloo between hosts that
have one rank each, both where some have several. The world itself carries no operations, so a group that fails takes
no other with it.
"""

from __future__ import annotations

import functools
import secrets
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from murmura.errors import RendezvousError
from murmura.transports.base import Transport
from murmura.transports.error_reporter import Reporter
from murmura.transports.hierarchical import HierarchicalTransport
from murmura.transports.in_process import InProcessTransport
from murmura.transports.liveness import Liveness
from murmura.transports.process_group import ProcessGroupTransport
from murmura.transports.rendezvous import Roster, Store, sign_in, under
from murmura.transports.shared_memory import SharedMemoryTransport
from murmura.transports.tagged_messages import TaggedMessages
from murmura.transports.watched_store import Watch, WatchedStore, nobody


class World:
    """A transport that groups split their channels off; closed when the last of them is.

    `members` are the ranks of the default group that its ranks are, and `liveness` watches those of this host.
    """

    def __init__(self, transport: Transport, token: str, members: Sequence[int], liveness: Liveness) -> None:
        self.transport = transport
        self.token = token
        self._members, self._liveness = members, liveness
        self._num_groups = 0
        self._lock = threading.Lock()

    def take(self) -> None:
        with self._lock:
            self._num_groups += 1

    def give_back(self) -> None:
        with self._lock:
            self._num_groups -= 1
            is_last = self._num_groups == 0
        if is_last:
            self.transport.close()
            self._liveness.close()

    def dead(self) -> list[int]:
        """The ranks of the default group that were in this world and have died on this host."""
        return [] if self.transport.closed else [self._members[place] for place in self._liveness.dead()]

    @property
    def usable(self) -> bool:
        return not self.transport.failed and not self.transport.closed


_worlds: weakref.WeakSet[World] = weakref.WeakSet()


class Channel:
    """What a process group communicates on: collectives in order, and messages beside them."""

    def __init__(self, world: World, transport: Transport, timeout: float) -> None:
        self._world = world
        self.transport = transport
        self.messages: TaggedMessages = transport.tagged_messages()
        self.set_timeout(timeout)
        self._closed = False
        world.take()

    def set_timeout(self, seconds: float) -> None:
        self.transport.timeout = self.messages.channel.timeout = seconds

    def abort(self, error: BaseException) -> None:
        self.transport.abort(error)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.messages.close()
            self.transport.close()
            self._world.give_back()


def open_channel(store: Store, rank: int, world_size: int, timeout: float, ranks: Sequence[int]) -> Channel:
    """Meet the other ranks of a new group at `store`; `ranks` are theirs in the default group, if it is not that."""
    if world_size == 1:
        alone = World(InProcessTransport.create_group(1, timeout=timeout)[0], "", [0], Liveness({}))
        return Channel(alone, alone.transport.channel("group"), timeout)
    reporter = Reporter(rank, ranks or range(world_size))
    watch = functools.partial(_look_for_deaths, reporter) if ranks else nobody
    roster = sign_in(under(store, "murmura"), rank, world_size, timeout, reporter, watch)
    world, places = _shared_world(roster, world_size, timeout, watch)
    if world is None:
        world, places = _join(roster, world_size, timeout, ranks or None, watch), range(world_size)
        _worlds.add(world)
    split = world.transport.split("group-" + "-".join(map(str, places)), list(places))
    assert split is not None  # this rank is a member
    return Channel(world, split, timeout)


def _look_for_deaths(reporter: Reporter) -> Exception | None:
    """The death of a rank of the new group that was in a world with this one."""
    dead = {rank for world in _worlds for rank in world.dead()}
    for place, rank in enumerate(reporter.world_ranks):
        if rank in dead:
            return reporter.lost(place, "the rendezvous of a new process group")
    return None


def _shared_world(roster: Roster, world_size: int, timeout: float, watch: Watch) -> tuple[World | None, Sequence[int]]:
    """A world that all ranks of the group are in, and their ranks there; None if there is none."""
    known = {world.token: world for world in _worlds if world.usable}
    said = ",".join(f"{token}:{world.transport.rank}" for token, world in known.items())
    told = _tell_all(roster, "worlds", said, world_size, timeout, watch)
    entries = [dict(each.split(":") for each in text.split(",") if each) for text in told]
    common = sorted(token for token in entries[0] if all(token in each for each in entries))
    if not common:
        return None, ()
    token = common[0]
    return known[token], [int(each[token]) for each in entries]


def _tell_all(roster: Roster, key: str, text: str, world_size: int, timeout: float, watch: Watch) -> list[str]:
    """Every rank's `text`, by the store."""
    store = WatchedStore(roster.store, timeout, watch)
    store.set(f"{key}/{roster.rank}", text or "-")
    told = []
    for peer in range(world_size):
        try:
            told.append(store.get(f"{key}/{peer}").decode().removeprefix("-"))
        except (dist.DistError, TimeoutError) as error:
            raise RendezvousError(
                f"rank {roster.world_ranks[roster.rank]} lost rank {roster.world_ranks[peer]} while the process group "
                f"was being set up: it had come, and said no more. Look at its own output. ({error})",
                (roster.world_ranks[peer],),
            ) from error
    return told


def _join(roster: Roster, world_size: int, timeout: float, ranks: Sequence[int] | None, watch: Watch) -> World:
    token = _tell_all(roster, "token", secrets.token_hex(16), world_size, timeout, watch)[0]
    rank, store = roster.rank, roster.store
    options: dict[str, Any] = {"timeout": timeout, "world_ranks": ranks}
    num_hosts = len(set(roster.hosts))
    transport: Transport
    if num_hosts == 1:
        transport = SharedMemoryTransport.join(f"c10d:{token}", rank, world_size, **options)
    elif num_hosts == world_size:
        transport = ProcessGroupTransport.join(under(store, "world"), rank, world_size, **options)
    else:
        transport = HierarchicalTransport.join(under(store, "world"), rank, world_size, **options)
    return World(transport, token, roster.world_ranks, Liveness(roster.pids))
