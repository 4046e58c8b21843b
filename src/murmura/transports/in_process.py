"""Ranks as threads of one process: for notebooks, tests, and to try an algorithm in milliseconds.

The ranks reach each other's tensors, so no message is staged. They synchronise through one object under one lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from murmura.collectives.chunks import chunk_bounds, plan_segments
from murmura.collectives.direct import push
from murmura.collectives.reduction import Reduction
from murmura.errors import ConfigError
from murmura.observe.probe import Probe
from murmura.transports import agreement
from murmura.transports.base import Pairs, Transport
from murmura.transports.checks import check_timeout, describe, flatten
from murmura.transports.cuda_streams import event_on_stream_of, stream_waits
from murmura.transports.error_reporter import ExitNotice
from murmura.transports.stalls import WaitDeadline, at_fault, is_recent
from murmura.transports.tagged_messages import Arrival, Inbox, Message, Receive, SentMessage, TaggedMessages, fill
from murmura.types import ReduceOp

__all__ = ["InProcessTransport"]


@dataclass
class _Message:
    """A tensor sent from one rank to another; the receiver copies it and sets `taken`.

    Of one on a GPU, only the work on it is queued by then: the receiver's stream begins to copy when the sender's has
    come to `filled`, and the sender's goes on when the receiver's has come to `copied`, if the host has not waited.
    """

    tensor: Tensor
    taken: bool = False
    refusal: str = ""  # what the receiver called instead, if it does not fit
    filled: torch.cuda.Event | None = None
    copied: torch.cuda.Event | None = None


class _SharedState:
    """The shared state of one channel's ranks; all of it is read and written under `changed`."""

    def __init__(self, world_size: int, parent: _SharedState | None = None, members: Sequence[int] = ()) -> None:
        self.world_size = world_size
        self._parent, self._members = parent, members  # of a channel: the state it was split from, and its ranks there
        self.changed = threading.Condition()
        self.arrived = [0] * world_size  # collectives each rank has entered
        self.phase = [0] * world_size  # synchronisations inside collectives that each rank has reached
        # What each rank called and brought, by the parity of the collective's number: nobody enters the one after
        # next before all have left this one.
        self.calls = [["nothing"] * world_size, ["nothing"] * world_size]
        self.brought: list[list[Any]] = [[None] * world_size, [None] * world_size]
        self.awaits: list[int | None] = [None] * world_size  # whom each rank waits for in an exchange
        self.messages: dict[tuple[int, int], deque[_Message]] = {}
        self.inboxes = [Inbox() for _ in range(world_size)]  # of tagged messages
        self.exited: dict[int, ExitNotice] = {}
        self.splits: dict[Any, _SharedState] = {}  # that not all of their ranks have joined yet
        self.num_joined = 0
        self.num_in_world: int = world_size if parent is None else parent.num_in_world
        # Whom a rank waits for in vain, by rank of the world, on whichever channel; each writes its own entry.
        self.stalled: dict[int, tuple[float, Sequence[int]]] = {} if parent is None else parent.stalled

    def exit_notice(self, rank: int) -> ExitNotice | None:
        """Why `rank` cannot be waited for, here or, if it never joined, in the state this one was split from."""
        notice = self.exited.get(rank)
        if notice is None and self._parent is not None:
            return self._parent.exit_notice(self._members[rank])
        return notice

    def awaited_by(self, rank: int) -> list[int]:
        """Return whom `rank` waits for in an exchange."""
        peer = self.awaits[rank]
        return [] if peer is None else [peer]

    def last_call(self, rank: int) -> str:
        return self.calls[self.arrived[rank] & 1][rank]

    def answer(self, peer: int, rank: int) -> None:
        """Note that `rank` did something that `peer` may wait for: until `peer` looks again, it awaits nobody."""
        if self.awaits[peer] == rank:
            self.awaits[peer] = None


class _Notes:
    """The stall notes of a world of threads, seen from rank `own`."""

    def __init__(self, stalled: dict[int, tuple[float, Sequence[int]]], own: int) -> None:
        self._stalled, self._own = stalled, own

    def tell(self, awaited: Sequence[int]) -> None:
        self._stalled[self._own] = time.monotonic(), awaited

    def awaited_by(self, rank: int) -> Sequence[int]:
        told, awaited = self._stalled.get(rank, (0.0, ()))
        return awaited if is_recent(told, time.monotonic()) else ()


class InProcessTransport(Transport):
    """One rank of a world of threads; made by `create_group`."""

    device = torch.device("cpu")

    def __init__(
        self,
        state: _SharedState,
        rank: int,
        *,
        hosts: Sequence[int] | None = None,
        timeout: float = 600.0,
        name: str = "",
        world_ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, state.world_size, hosts=hosts, timeout=timeout, name=name, world_ranks=world_ranks)
        self._state = state
        # Of two ranks, only the other can be at fault.
        self._notes = _Notes(state.stalled, self.reporter.own) if state.num_in_world > 2 else None
        self._waiting_probe: Probe | None = None

    @classmethod
    def create_group(
        cls, n: int, *, hosts: Sequence[int] | None = None, timeout: float = 600.0
    ) -> list[InProcessTransport]:
        """The `n` transports of a new world, in rank order; hand one to each thread.

        `hosts` says on which host each rank pretends to be: ``[0, 0, 1, 1]``.
        """
        faults = []
        if n < 1:
            faults.append(f"n={n}: a world has at least one rank.")
        if hosts is not None and len(hosts) != n:
            faults.append(f"hosts={list(hosts)}: name a host for each of the {n} ranks.")
        if faults:
            raise ConfigError("\n".join(faults))
        state = _SharedState(n)
        return [cls(state, rank, hosts=hosts, timeout=timeout) for rank in range(n)]

    def split(self, name: str, ranks: Sequence[int] | None = None) -> InProcessTransport | None:
        members = self.split_members(ranks)
        if members is None:
            return None
        agreement.on_split(self, name, members)
        key = name, members, self.split_ordinal(name, members)
        with self._state.changed:
            state = self._state.splits.setdefault(key, _SharedState(len(members), self._state, members))
            state.num_joined += 1
            if state.num_joined == len(members):  # nobody else will ask for it
                del self._state.splits[key]
        split = InProcessTransport(
            state,
            members.index(self.rank),
            **self.split_options(name, members),
        )
        self.keep_split(split, members)
        return split

    def tagged_messages(self) -> TaggedMessages:
        channel = self.channel("tagged messages")
        assert isinstance(channel, InProcessTransport)
        return _InProcessMessages(channel)

    def observe_waiting(self, probe: Probe | None) -> None:
        self._waiting_probe = probe

    def on_abort(self, error: BaseException) -> None:
        self._announce_exit(ExitNotice.of(error, self.reporter.own))

    def on_close(self) -> None:
        self._announce_exit(self.exit_notice())

    def _announce_exit(self, notice: ExitNotice) -> None:
        with self._state.changed:
            self._state.exited.setdefault(self.rank, notice)
            self._state.changed.notify_all()

    # Collectives

    def all_reduce_flat(
        self, flat_in: Tensor, flat_out: Tensor, op: ReduceOp, call: str, timeout: float | None
    ) -> None:
        payload = self._enter(call, (flat_in, flat_out), timeout)
        reduction = Reduction(op, flat_in.dtype, self.world_size, flat_in.device)
        numel = flat_in.numel()
        share = chunk_bounds(numel, self.world_size, self.rank)
        push(
            [reduction.array(each) for each, _ in payload],
            [reduction.array(each) for _, each in payload],
            self.rank,
            plan_segments(numel, flat_in.element_size(), self.world_size, *share),
            reduction,
        )
        self._sync(timeout)

    def broadcast_flat(self, flat: Tensor, src: int, call: str, timeout: float | None) -> None:
        payload = self._enter(call, flat, timeout)
        if self.rank != src:
            flat.copy_(payload[src])
        self._sync(timeout)

    def do_barrier(self, timeout: float | None) -> None:
        self._enter("barrier()", None, timeout)

    def compare_calls(self, call: str, timeout: float | None) -> None:
        self._enter(call, None, timeout)

    def _enter(self, call: str, brought: Any, timeout: float | None) -> list[Any]:
        """Enter a collective; return what every rank brought, once all have entered and called the same."""
        state, rank = self._state, self.rank
        with state.changed:
            number = state.arrived[rank] + 1
            parity = number & 1
            state.calls[parity][rank], state.brought[parity][rank] = call, brought
            state.arrived[rank] = number
            state.changed.notify_all()

            def missing() -> list[int]:
                return [peer for peer in range(self.world_size) if state.arrived[peer] < number]

            self._wait(missing, timeout, stuck=lambda peer: state.awaits[peer] == rank)
            calls = state.calls[parity]
            if any(each != call for each in calls):
                raise self.reporter.mismatch(self.operation, dict(enumerate(calls)))
            return list(state.brought[parity])

    def _sync(self, timeout: float | None) -> None:
        """Wait until every rank has reached this point of the collective."""
        state = self._state
        with state.changed:
            phase = state.phase[self.rank] = state.phase[self.rank] + 1
            state.changed.notify_all()
            self._wait(lambda: [peer for peer in range(self.world_size) if state.phase[peer] < phase], timeout)

    # Point to point

    def do_exchange(self, sends: Pairs, recvs: Pairs, timeout: float | None) -> None:
        state, rank = self._state, self.rank
        inbox = list(recvs)
        outbox: list[tuple[_Message, int]] = []

        def unfinished() -> list[int]:
            """Take what has come; return whom this rank still waits for."""
            left: list[tuple[Tensor, int]] = []
            for out, src in inbox:
                queue = state.messages.get((src, rank))
                if queue and all(src != other for _, other in left):
                    self._take(queue.popleft(), out.detach(), src)
                else:
                    left.append((out, src))
            inbox[:] = left
            waiting = [src for _, src in left]
            for message, dst in outbox:
                if message.refusal:
                    calls = {rank: self._describe_call("send(dst={})", dst, message.tensor), dst: message.refusal}
                    raise self.reporter.mismatch(self.operation, calls)
                if not message.taken:
                    waiting.append(dst)
            state.awaits[rank] = waiting[0] if waiting else None
            return waiting

        with state.changed:
            for tensor, dst in sends:
                message = _Message(tensor.detach(), filled=event_on_stream_of(tensor))
                state.messages.setdefault((rank, dst), deque()).append(message)
                outbox.append((message, dst))
                state.answer(dst, rank)
            state.changed.notify_all()
            try:
                self._wait(unfinished, timeout, stuck=lambda peer: state.arrived[peer] > state.arrived[rank])
            finally:
                state.awaits[rank] = None
                for message, _ in outbox:
                    stream_waits(message.tensor, message.copied)

    def _take(self, message: _Message, out: Tensor, src: int) -> None:
        sent, wanted = describe(message.tensor), describe(out)
        if sent != wanted:
            message.refusal = self._describe_call("recv(src={})", src, out)
            calls = {src: self._describe_call("send(dst={})", self.rank, message.tensor), self.rank: message.refusal}
            raise self.reporter.mismatch(self.operation, calls)
        stream_waits(message.tensor, message.filled)
        out.copy_(message.tensor)
        message.copied = event_on_stream_of(out) if message.tensor.is_cuda else None  # host memory may be written again
        message.taken = True
        self._state.answer(src, self.rank)
        self._state.changed.notify_all()

    def _describe_call(self, call: str, peer: int, tensor: Tensor) -> str:
        return f"{call.format(self.reporter.world_rank(peer))} of {describe(tensor)}"

    # Waiting

    def _wait(
        self,
        missing: Callable[[], list[int]],
        timeout: float | None,
        stuck: Callable[[int], bool] = lambda peer: False,
    ) -> None:
        """Wait, holding the lock, until nobody is `missing`; `stuck(peer)` says that both would wait for ever."""
        state = self._state
        reporter, operation = self.reporter, self.operation
        deadline = WaitDeadline(reporter, operation, self.seconds(timeout), self._notes)
        if self._waiting_probe is not None:
            missing = self._waiting_probe.waiting(missing)
        while awaited := missing():
            if self.failure is not None:  # aborted by another thread
                raise reporter.aborted(self.failure, operation, deadline.waited)
            if self.closed:
                raise reporter.closed(operation)
            for peer in awaited:
                notice = state.exit_notice(peer)
                if notice is not None:
                    raise reporter.peer_exited(notice, peer, operation, deadline.waited)
                if stuck(peer):
                    calls = {self.rank: f"{operation}, waiting for rank {reporter.world_rank(peer)}"}
                    called = "an exchange" if state.awaits[peer] == self.rank else state.last_call(peer)
                    calls[peer] = f"{called}, waiting for rank {reporter.own}"
                    raise reporter.mismatch(operation, calls)
            deadline.check(at_fault(awaited, state.awaited_by, self.rank) if deadline.remaining <= 0 else awaited)
            state.changed.wait(max(0.001, min(deadline.remaining, 1.0)))
        deadline.end()


class _InProcessMessages(TaggedMessages):
    """Tagged messages between threads: each rank has an inbox, in the state that all share."""

    channel: InProcessTransport

    def post_send(self, tensor: Tensor, dst: int, tag: int) -> Message:
        state = self.channel._state
        copy = flatten(tensor, self.channel.device).clone().view(torch.uint8)
        with state.changed:
            inbox = state.inboxes[dst]
            inbox.arrive(Arrival(self.rank, tag, copy.nbytes, lambda flat: fill(flat, copy)))
            inbox.match()
            state.changed.notify_all()
        return SentMessage(self.rank)

    def post_recv(self, receive: Receive) -> Message:
        with self.channel._state.changed:
            self.channel._state.inboxes[self.rank].post(receive)
        return _Received(self.channel, receive)

    def close(self) -> None:
        self.channel.close()


class _Received(Message):
    def __init__(self, channel: InProcessTransport, receive: Receive) -> None:
        self._channel, self._receive = channel, receive
        self._peers = [peer for peer in range(channel.world_size) if peer != channel.rank]

    @property
    def source(self) -> int:  # type: ignore[override]
        return self._receive.arrived_from

    def done(self) -> bool:
        receive, channel = self._receive, self._channel
        if receive.ended or channel.failed or channel.closed:
            return True
        with channel._state.changed:  # a rank has sent what it sends before it leaves
            senders = self._peers if receive.source is None else [receive.source]
            return receive.ended or all(
                channel._state.exit_notice(peer) is not None for peer in senders or [channel.rank]
            )

    def wait(self, timeout: float | None = None) -> None:
        check_timeout(timeout)
        receive, channel, state = self._receive, self._channel, self._channel._state
        peers = self._peers

        def missing() -> list[int]:
            if receive.ended:
                return []
            if receive.source is not None:
                return [receive.source]
            return [peer for peer in peers if state.exit_notice(peer) is None] or peers or [channel.rank]

        with state.changed:
            channel.operation = receive.operation
            try:
                channel._wait(missing, timeout)
            except BaseException as error:
                channel.abort(error)
                raise
        if receive.error is not None:
            raise receive.error
