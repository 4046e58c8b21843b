"""The groups a hierarchical transport consists of: which ranks belong to each, and how a rank joins them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from torch import Tensor

from murmura.errors import PeerTimeout, RendezvousError, TransportError
from murmura.transports.failure_log import FailureLog, is_timeout
from murmura.transports.host import leaders_of, members_of
from murmura.transports.objects import broadcast_bytes
from murmura.transports.process_group import ProcessGroupTransport
from murmura.transports.rendezvous import Store, under
from murmura.transports.shared_memory import SharedMemoryTransport

SEGMENT_BYTES = 4 * 2**20
"""What goes over the network at a time: long enough for its full rate, short enough that memory is soon at work."""

SEGMENTS_AHEAD = 2
"""Segments given to the network before the first of them is waited for: one on its way, one ready to follow."""


class ManagedGroup(ProcessGroupTransport):
    """A process group inside another transport, which explains its failures and announces exits in its place."""

    @property
    def failure_log(self) -> FailureLog:
        assert self._failure_log is not None  # it was joined on a store
        return self._failure_log

    def abort(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
            for split in list(self._splits):
                split.abort(error)

    def break_off(self, error: BaseException) -> None:
        """Fail, and close the connections, so that waits here and waits of peers for this rank end."""
        self.abort(error)
        if not self.closed:
            self.end_group_waits()

    def explain(self, error: Exception, operation: str, waited: float) -> Exception:
        return (PeerTimeout if is_timeout(error) else TransportError)(str(error), rank=self.reporter.own)


def cut(flat: Tensor) -> Sequence[Tensor]:
    """Segments of a flat buffer; one, if it is short or empty."""
    if flat.nbytes <= SEGMENT_BYTES:
        return (flat,)
    step = SEGMENT_BYTES // flat.element_size()
    return [flat[start : start + step] for start in range(0, flat.numel(), step)]


def share_memory(across: ManagedGroup) -> SharedMemoryTransport:
    """Join the other ranks of this host under a name that nobody else can know."""
    name = broadcast_bytes(across, secrets.token_bytes(16)).hex()
    members, host = members_of(across.hosts, across.rank), across.hosts[across.rank]
    try:
        return SharedMemoryTransport.join(
            f"{name}:{host}",
            members.index(across.rank),
            len(members),
            hosts=[host] * len(members),
            timeout=across.timeout,
            world_ranks=[across.world_ranks[member] for member in members],
            watch=lambda: across.failure_log.cause("the rendezvous"),
        )
    except RendezvousError as error:
        near = [across.world_ranks[member] for member in members]
        raise RendezvousError(
            f"rank {near[members.index(across.rank)]} could not share memory with all of ranks {near}, which are on "
            f"its host: {error}",
            tuple(near[place] for place in error.missing),
        ) from error


def join_leaders(store: Store, across: ManagedGroup, kind: str) -> ManagedGroup | None:
    """The group of the leaders, on a leader; None elsewhere, and where there is one host only."""
    leaders = leaders_of(across.hosts)
    if across.rank not in leaders or len(leaders) == 1:
        return None
    return ManagedGroup.join(
        under(store, "between"),
        leaders.index(across.rank),
        len(leaders),
        kind=kind,
        timeout=across.timeout,
        name=f"{across.name}/leaders",
        world_ranks=[across.world_ranks[leader] for leader in leaders],
        watch=lambda: across.failure_log.cause("the rendezvous"),
    )
