"""HierarchicalTransport: ranks on several hosts; shared memory inside a host, a process group between hosts.

`inside` joins the ranks of this host; the first of them is its `leader`; `between` joins the leaders; `across` joins
all ranks. All-reduce, broadcast and barrier send each byte once to a host instead of once to a rank, and work on the
memory while the network works. Every other operation consists of messages from rank to rank: those to a rank of the
same host go `inside`, the others `across`. An error of one of the three groups is raised in ranks of the whole.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from murmura.collectives.deadline import Deadline
from murmura.errors import CollectiveMismatch, PeerLost, PeerTimeout, TransportError, mismatch
from murmura.observe.probe import Probe
from murmura.transports import agreement
from murmura.transports.base import Pairs, Transport
from murmura.transports.checks import describe_exchange
from murmura.transports.error_reporter import ExitNotice
from murmura.transports.hierarchical import groups
from murmura.transports.hierarchical.groups import SEGMENTS_AHEAD, ManagedGroup, cut
from murmura.transports.host import leaders_of, members_of
from murmura.transports.process_group import Check, ProcessGroupTransport
from murmura.transports.rendezvous import Store, bounded, under
from murmura.transports.serial_executor import Ticket
from murmura.transports.shared_memory import SharedMemoryTransport
from murmura.transports.stalls import WaitDeadline
from murmura.transports.tagged_messages import TaggedMessages
from murmura.types import ReduceOp, parse

__all__ = ["HierarchicalTransport"]


class HierarchicalTransport(Transport):
    """One rank of a world on several hosts; made by `join`, `connect` or `run_world`. Works in host memory.

    `check="always"` compares the calls of all ranks before every operation, for a round trip; otherwise those of a
    host's ranks are compared always, and those of different hosts after a time-out.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        store: Store,
        across: ManagedGroup,
        inside: SharedMemoryTransport,
        between: ManagedGroup | None,
        *,
        kind: str = "gloo",
        check: str = "best_effort",
    ) -> None:
        super().__init__(
            across.rank,
            across.world_size,
            hosts=across.hosts,
            timeout=across.timeout,
            name=across.name,
            world_ranks=across.world_ranks,
        )
        self.check = parse(Check, check, "check")
        self._store, self._kind = store, kind
        self._across, self._inside, self._between = across, inside, between
        self._leaders = leaders_of(self.hosts)
        self._members = members_of(self.hosts, self.rank)
        self._place = {member: place for place, member in enumerate(self._members)}  # of a rank on this host
        self._others = [rank for rank in range(self.world_size) if rank != self.rank]
        self._neighbours = [rank for rank in self._members if rank != self.rank]
        self._call, self._began = "", 0.0  # of the operation under way: what was called, and when

    @classmethod
    def join(
        cls, store: Store, rank: int, world_size: int, *, kind: str = "gloo", check: str = "best_effort", **options: Any
    ) -> Self:
        """Join the other ranks at `store`; every rank calls it with the same store.

        `kind` is that of the group between the leaders; `options` (`timeout`, `hosts`, `name`) are those of
        `ProcessGroupTransport.join`.
        """
        return cls._build(store, rank, world_size, groups.share_memory, kind, check, **options)

    @classmethod
    def _build(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        share: Callable[[ManagedGroup], SharedMemoryTransport],
        kind: str,
        check: str,
        **options: Any,
    ) -> Self:
        """Join the three groups; `share` makes the one inside the host, once all ranks have joined `across`."""
        store = bounded(store)
        with contextlib.ExitStack() as made:
            across = ManagedGroup.join(under(store, "across"), rank, world_size, check="always", **options)
            made.callback(across.close)
            try:
                inside = share(across)
                made.callback(inside.close)
                between = groups.join_leaders(store, across, kind)
                across.barrier()  # one that did its part and left at once would be missed where others still join
            except BaseException as error:  # the others hear of it before `across` is closed
                across.failure_log.announce_exit(ExitNotice.of(error, across.reporter.own))
                across.abort(error)
                raise
            made.pop_all()
        return cls(store, across, inside, between, kind=kind, check=check)

    # Transport's contract

    def split(self, name: str, ranks: Sequence[int] | None = None) -> Transport | None:
        members = self.split_members(ranks)
        if members is None:
            return None
        split: Transport | None = self.run_in_turn("exchange", lambda: self._split(name, members))
        return split

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        self.check_usable()
        return self._inside.allocate(numel, dtype, device)

    def tagged_messages(self) -> TaggedMessages:
        # A receive from any source cannot wait for memory and a network at once.
        messages = self._across.tagged_messages()
        self.keep_split(messages.channel, None)
        return messages

    def observe_waiting(self, probe: Probe | None) -> None:
        self._inside.observe_waiting(None if probe is None else probe.within(self._members))

    def on_abort(self, error: BaseException) -> None:
        if not self.closed:
            # First, so that whoever fails for it finds the cause.
            self._across.failure_log.announce_exit(ExitNotice.of(error, self.reporter.own))
        self._end_waits(error)

    def on_close(self) -> None:
        if self.failure is None:
            self._across.failure_log.announce_exit(self.exit_notice())
        if not self._executor.idle:  # what still waits in the communication thread will wait no more
            self._end_waits(self.reporter.closed(self.operation or "an operation"))

    def release(self) -> None:
        for group in (self._between, self._across, self._inside):
            if group is not None:
                group.close()
        self._store = self.store_served = None

    def _end_waits(self, error: BaseException) -> None:
        """End the waits of this rank, and those of its peers for it."""
        self._inside.abort(error)
        for group in (self._between, self._across):
            if group is not None:
                group.break_off(error)

    # Collectives by host

    def all_reduce_flat(
        self, flat_in: Tensor, flat_out: Tensor, op: ReduceOp, call: str, timeout: float | None
    ) -> None:
        if op is ReduceOp.MEAN and flat_in.dtype is torch.float16:  # whose range the sum may exceed
            wide = flat_in.float()
            self.all_reduce_flat(wide, wide, op, call, timeout)
            flat_out.copy_(wide)
            return
        deadline = Deadline(self.seconds(timeout))
        self.compare_calls(call, timeout)
        if flat_out is not flat_in:
            flat_out.copy_(flat_in)
        if len(self._leaders) == 1:
            self._reduce_inside(flat_out, op, deadline)
            return
        partial = ReduceOp.SUM if op is ReduceOp.MEAN else op
        segments = cut(flat_out)
        sums: deque[Ticket | None] = deque()
        for turn in range(len(segments) + SEGMENTS_AHEAD):
            if turn < len(segments):
                self._reduce_inside(segments[turn], partial, deadline)
                sums.append(self._start_sum(segments[turn], partial, deadline))
            if turn >= SEGMENTS_AHEAD:
                segment, total = segments[turn - SEGMENTS_AHEAD], sums.popleft()
                if total is not None:
                    self._await(total)
                    if op is ReduceOp.MEAN:
                        segment.div_(self.world_size)
                self._broadcast_inside(segment, 0, deadline)

    def broadcast_flat(self, flat: Tensor, src: int, call: str, timeout: float | None) -> None:
        deadline = Deadline(self.seconds(timeout))
        self.compare_calls(call, timeout)
        at_home = src in self._place
        root = self._leaders.index(members_of(self.hosts, src)[0])
        segments = cut(flat.view(torch.uint8))
        copies = []
        for segment in segments:
            if at_home:
                self._broadcast_inside(segment, self._place[src], deadline)
            copies.append(self._start_copy(segment, root, deadline))
        for segment, copy in zip(segments, copies, strict=True):
            if copy is not None:
                self._await(copy)
            if not at_home:
                self._broadcast_inside(segment, 0, deadline)

    def do_barrier(self, timeout: float | None) -> None:
        deadline = Deadline(self.seconds(timeout))
        self.compare_calls("barrier()", timeout)  # for which the ranks of a host have met
        token = torch.zeros(1)
        total = self._start_sum(token, ReduceOp.SUM, deadline)
        if total is not None:
            self._await(total)
        self._broadcast_inside(token, 0, deadline)

    def compare_calls(self, call: str, timeout: float | None) -> None:
        self._call, self._began = call, time.monotonic()
        seconds, operation, across = self.seconds(timeout), self.operation, self._across
        if self.check is Check.ALWAYS and self.world_size > 1:

            def compare() -> None:
                agreement.on_collective(across.move, call, self.rank, self.reporter, operation, seconds, self.device)

            self._await(self._start(across, "agreement", compare, self._others))
        elif self._neighbours:
            with self._explained(self._others):
                self._inside.run_in_turn("agreement", lambda: self._inside.compare_calls(call, seconds))

    # A collective fails for want of any rank, whichever this one waits for: hence `others`

    def _reduce_inside(self, flat: Tensor, op: ReduceOp, deadline: Deadline) -> None:
        if self._neighbours:
            with self._explained(self._others):
                self._inside.all_reduce(flat, op, timeout=deadline.left())

    def _broadcast_inside(self, flat: Tensor, place: int, deadline: Deadline) -> None:
        if self._neighbours:
            with self._explained(self._others):
                self._inside.broadcast(flat, place, timeout=deadline.left())

    def _start_sum(self, flat: Tensor, op: ReduceOp, deadline: Deadline) -> Ticket | None:
        """On a leader, begin to reduce `flat` over the hosts, in place."""
        between = self._between
        if between is None:
            return None
        return self._start(between, "sum", lambda: between.all_reduce(flat, op, timeout=deadline.left()))

    def _start_copy(self, flat: Tensor, root: int, deadline: Deadline) -> Ticket | None:
        """On a leader, begin to copy `flat` from the leader of host number `root` to the others."""
        between = self._between
        if between is None:
            return None
        return self._start(between, "copy", lambda: between.broadcast(flat, root, timeout=deadline.left()))

    # Messages

    def do_exchange(self, sends: Pairs, recvs: Pairs, timeout: float | None) -> None:
        """Exchange inside and across at the same time, since on another rank either may wait for the other."""
        deadline = Deadline(self.seconds(timeout))
        is_whole = self.operation == "exchange"  # and not part of a collective
        if is_whole:
            self._call, self._began = describe_exchange(sends, recvs), time.monotonic()
        near_sends, far_sends = self._sort(sends)
        near_recvs, far_recvs = self._sort(recvs)
        far: Ticket | None = None
        far_peers = sorted({peer for _, peer in (*far_sends, *far_recvs)})
        if far_peers:
            # `across` compares what belongs to an exchange, and only that.
            name = "exchange" if is_whole and self.check is Check.ALWAYS else "messages"
            across = self._across
            far = self._start(
                across, name, lambda: across.exchange(far_sends, far_recvs, timeout=deadline.left()), far_peers
            )
        if near_sends or near_recvs:
            with self._explained([self._members[place] for _, place in (*near_sends, *near_recvs)]):
                self._inside.exchange(near_sends, near_recvs, timeout=deadline.left())
        if far is not None:
            self._await(far, far_peers)

    def _sort(self, pairs: Pairs) -> tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]:
        """The messages inside this host, by place in it, and those to and from other hosts, by rank."""
        near = [(tensor, self._place[peer]) for tensor, peer in pairs if peer in self._place]
        return near, [(tensor, peer) for tensor, peer in pairs if peer not in self._place]

    # Splitting

    def _split(self, name: str, members: tuple[int, ...]) -> Transport | None:
        """Shared memory where all members are on one host, a process group where no two are, else both again."""
        self._began = time.monotonic()
        near = [self._place[member] for member in members if member in self._place]
        if len(near) == len(members):
            inside = self._split_inside(name, near, members)
            inside.use_stall_notes(self._across.failure_log.notes)
            self.keep_split(inside, members)
            return inside
        agreement.on_split(self, name, members)
        ordinal = self.split_ordinal(name, members)
        store = under(self._store, f"split/{name}/{'-'.join(map(str, members))}/{ordinal}")
        rank, size = members.index(self.rank), len(members)
        options: dict[str, Any] = {
            **self.split_options(name, members),
            "watch": lambda: self._across.failure_log.cause(f"split({name!r})", among=members),
            "notes": self._across.failure_log.notes,
        }
        join: Callable[..., Transport] = ProcessGroupTransport.join
        if len(set(options["hosts"])) < size:
            join, options["share"] = self._build, lambda _: self._split_inside(name, near, members)
        split = join(store, rank, size, kind=self._kind, check=self.check, **options)
        self.keep_split(split, members)
        return split

    def _split_inside(self, name: str, places: Sequence[int], members: Sequence[int]) -> SharedMemoryTransport:
        with self._explained(members):
            split = self._inside.split(name, places)
        assert split is not None  # this rank is a member
        return split

    # Waiting and failing

    def _start(
        self, group: ManagedGroup, name: str, work: Callable[[], Any], awaited: Sequence[int] | None = None
    ) -> Ticket:
        """Do `work` in the communication thread of `group`; if it fails, this rank's waits inside its host end too."""

        def guarded() -> None:
            try:
                with self._explained(self._others if awaited is None else awaited):
                    work()
            except BaseException as error:
                self.abort(error)
                raise

        return group.submit(name, guarded)

    def _await(self, ticket: Ticket, awaited: Sequence[int] | None = None) -> None:
        deadline = WaitDeadline(self.reporter, self.operation)  # the operation has a deadline of its own
        with self._explained(self._others):
            while not ticket.await_end(1.0):
                deadline.check(self._others if awaited is None else awaited)
            ticket.wait()

    @contextlib.contextmanager
    def _explained(self, awaited: Sequence[int]) -> Iterator[None]:
        """Translate an error of a group into one of the whole transport, which had waited for `awaited`."""
        try:
            yield
        except (TransportError, CollectiveMismatch) as error:
            explained = self._explain(error, awaited)
            if explained is error:
                raise
            raise explained from error

    def _explain(
        self, error: TransportError | CollectiveMismatch, awaited: Sequence[int]
    ) -> TransportError | CollectiveMismatch:
        if isinstance(self.failure, TransportError | CollectiveMismatch):  # in another thread, which is the cause
            return self.failure
        waited, reporter = time.monotonic() - self._began, self.reporter
        if self.failure is not None:
            return reporter.again(self.failure, self.operation)
        if self.closed:
            return reporter.closed(self.operation)
        if isinstance(error, CollectiveMismatch):  # of a part, which knows the ranks of the world
            return mismatch(reporter.own, self.operation, error.calls)
        failure_log = self._across.failure_log
        if isinstance(error, PeerLost):
            return failure_log.cause(self.operation, waited) or reporter.aborted(error, self.operation, waited)
        return failure_log.explain(
            self._call,
            self.operation,
            waited,
            awaited=[rank for rank in awaited if rank != self.rank],
            timed_out=isinstance(error, PeerTimeout),
            told=error,
        )
