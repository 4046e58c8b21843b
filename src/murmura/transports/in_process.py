"""Ranks as threads of one process: for notebooks, tests, and to try an algorithm in milliseconds.

The ranks reach each other's tensors, so nothing is copied on the way; they meet on a board under one lock.
"""

from __future__ import annotations

import threading
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
from murmura.transports.checks import check_members, describe
from murmura.transports.failures import Departure, Patience, follow
from murmura.transports.order import Ticket
from murmura.types import ReduceOp

__all__ = ["InProcessTransport"]


@dataclass
class _Message:
    """A tensor on offer from one rank to another; the receiver copies it and says so."""

    tensor: Tensor
    taken: bool = False
    refusal: str = ""  # what the receiver called instead, if it does not fit


class _Board:
    """What the ranks of one channel know of each other; all of it is read and written under `changed`."""

    def __init__(self, world_size: int, parent: _Board | None = None, members: Sequence[int] = ()) -> None:
        self.world_size = world_size
        self._parent, self._members = parent, members  # of a channel: the board it was split from, and its ranks there
        self.changed = threading.Condition()
        self.arrived = [0] * world_size  # collectives each rank has entered
        self.phase = [0] * world_size  # meetings inside collectives each rank has come to
        # What each rank called and brought, by the parity of the collective's number: nobody enters the one after
        # next before all have left this one.
        self.calls = [["nothing"] * world_size, ["nothing"] * world_size]
        self.brought: list[list[Any]] = [[None] * world_size, [None] * world_size]
        self.awaits: list[int | None] = [None] * world_size  # whom each rank waits for in an exchange
        self.mail: dict[tuple[int, int], deque[_Message]] = {}
        self.departed: dict[int, Departure] = {}
        self.splits: dict[Any, _Board] = {}  # that not all of their ranks have joined yet
        self.num_joined = 0

    def departure(self, rank: int) -> Departure | None:
        """Why `rank` cannot be waited for, here or, if it never came here, on the board this one was split from."""
        departure = self.departed.get(rank)
        if departure is None and self._parent is not None:
            return self._parent.departure(self._members[rank])
        return departure

    def idle_of(self, awaited: Sequence[int]) -> list[int]:
        """Those on whom `awaited` hang: a rank that waits for another in an exchange is not at fault, but that one."""
        return [follow(peer, self.awaits.__getitem__) for peer in awaited]

    def last_call(self, rank: int) -> str:
        return self.calls[self.arrived[rank] & 1][rank]

    def answer(self, peer: int, rank: int) -> None:
        """`rank` has done something that `peer` may wait for: until `peer` looks again, it awaits nobody."""
        if self.awaits[peer] == rank:
            self.awaits[peer] = None


class InProcessTransport(Transport):
    """One rank of a world of threads; made by `create_group`."""

    _works_on = torch.device("cpu")

    def __init__(
        self,
        board: _Board,
        rank: int,
        *,
        hosts: Sequence[int] | None = None,
        timeout: float = 600.0,
        name: str = "",
        world_ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, board.world_size, hosts=hosts, timeout=timeout, name=name, world_ranks=world_ranks)
        self._board = board
        self._waiting_probe: Probe | None = None
        self._split_counts: dict[Any, int] = {}

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
        board = _Board(n)
        return [cls(board, rank, hosts=hosts, timeout=timeout) for rank in range(n)]

    def exchange(
        self, sends: Pairs, recvs: Pairs, *, async_op: bool = False, timeout: float | None = None
    ) -> Ticket | None:
        self._check_pairs(sends, recvs, timeout)
        return self._operate(  # type: ignore[no-any-return]
            "exchange", lambda: self._exchange(sends, recvs, timeout), async_op, self._sent(sends)
        )

    def split(self, name: str, ranks: Sequence[int] | None = None) -> InProcessTransport | None:
        members = tuple(range(self.world_size)) if ranks is None else tuple(ranks)
        check_members(members, self.world_size)
        self._check_usable()
        if self.rank not in members:
            return None
        agreement.on_split(self, name, members)
        # The k-th split of a name is one channel on every member, whatever else they split in between.
        ordinal = self._split_counts[name, members] = self._split_counts.get((name, members), 0) + 1
        key = name, members, ordinal
        with self._board.changed:
            board = self._board.splits.setdefault(key, _Board(len(members), self._board, members))
            board.num_joined += 1
            if board.num_joined == len(members):  # nobody else will ask for it
                del self._board.splits[key]
        split = InProcessTransport(
            board,
            members.index(self.rank),
            hosts=[self.hosts[rank] for rank in members],
            timeout=self.timeout,
            name=f"{self.name}/{name}",
            world_ranks=[self.world_ranks[rank] for rank in members],
        )
        self._keep(split, members)
        return split

    def _observe_waiting(self, probe: Probe | None) -> None:
        self._waiting_probe = probe

    def abort(self, error: BaseException) -> None:
        if self._failure is None:
            super().abort(error)
            self._depart(Departure.of(error, self._reporter.own))
            for split in list(self._splits):
                split.abort(error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for split in list(self._splits):
            split.close()
        self._depart(self._parting())
        self._order.close()

    def _depart(self, departure: Departure) -> None:
        with self._board.changed:
            self._board.departed.setdefault(self.rank, departure)
            self._board.changed.notify_all()

    # Collectives

    def _all_reduce(self, flat_in: Tensor, flat_out: Tensor, op: ReduceOp, call: str, timeout: float | None) -> None:
        payload = self._meet("all_reduce" + call, (flat_in, flat_out), timeout)
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

    def _broadcast(self, flat: Tensor, src: int, call: str, timeout: float | None) -> None:
        payload = self._meet("broadcast" + call, flat, timeout)
        if self.rank != src:
            flat.copy_(payload[src])
        self._sync(timeout)

    def _barrier(self, timeout: float | None) -> None:
        self._meet("barrier()", None, timeout)

    def _agree(self, call: str, timeout: float | None) -> None:
        self._meet(call, None, timeout)

    def _meet(self, call: str, brought: Any, timeout: float | None) -> list[Any]:
        """Enter a collective; return what every rank brought, once all are here and called the same."""
        board, rank = self._board, self.rank
        with board.changed:
            number = board.arrived[rank] + 1
            parity = number & 1
            board.calls[parity][rank], board.brought[parity][rank] = call, brought
            board.arrived[rank] = number
            board.changed.notify_all()

            def missing() -> list[int]:
                return [peer for peer in range(self.world_size) if board.arrived[peer] < number]

            self._wait(missing, timeout, stuck=lambda peer: board.awaits[peer] == rank)
            calls = board.calls[parity]
            if any(each != call for each in calls):
                raise self._reporter.mismatch(self._operation, dict(enumerate(calls)))
            return list(board.brought[parity])

    def _sync(self, timeout: float | None) -> None:
        """Meet again inside a collective."""
        board = self._board
        with board.changed:
            phase = board.phase[self.rank] = board.phase[self.rank] + 1
            board.changed.notify_all()
            self._wait(lambda: [peer for peer in range(self.world_size) if board.phase[peer] < phase], timeout)

    # Point to point

    def _exchange(self, sends: Pairs, recvs: Pairs, timeout: float | None) -> None:
        board, rank = self._board, self.rank
        inbox = list(recvs)
        outbox: list[tuple[_Message, int]] = []

        def unfinished() -> list[int]:
            """Take what has come; return whom this rank still waits for."""
            left: list[tuple[Tensor, int]] = []
            for out, src in inbox:
                mail = board.mail.get((src, rank))
                if mail and all(src != other for _, other in left):
                    self._take(mail.popleft(), out.detach(), src)
                else:
                    left.append((out, src))
            inbox[:] = left
            waiting = [src for _, src in left]
            for message, dst in outbox:
                if message.refusal:
                    calls = {rank: self._told("send(dst={})", dst, message.tensor), dst: message.refusal}
                    raise self._reporter.mismatch(self._operation, calls)
                if not message.taken:
                    waiting.append(dst)
            board.awaits[rank] = waiting[0] if waiting else None
            return waiting

        with board.changed:
            for tensor, dst in sends:
                message = _Message(tensor.detach())
                board.mail.setdefault((rank, dst), deque()).append(message)
                outbox.append((message, dst))
                board.answer(dst, rank)
            board.changed.notify_all()
            try:
                self._wait(unfinished, timeout, stuck=lambda peer: board.arrived[peer] > board.arrived[rank])
            finally:
                board.awaits[rank] = None

    def _take(self, message: _Message, out: Tensor, src: int) -> None:
        sent, wanted = describe(message.tensor), describe(out)
        if sent != wanted:
            message.refusal = self._told("recv(src={})", src, out)
            calls = {src: self._told("send(dst={})", self.rank, message.tensor), self.rank: message.refusal}
            raise self._reporter.mismatch(self._operation, calls)
        out.copy_(message.tensor)
        message.taken = True
        self._board.answer(src, self.rank)
        self._board.changed.notify_all()

    def _told(self, call: str, peer: int, tensor: Tensor) -> str:
        return f"{call.format(self._reporter.world_rank(peer))} of {describe(tensor)}"

    # Waiting

    def _wait(
        self,
        missing: Callable[[], list[int]],
        timeout: float | None,
        stuck: Callable[[int], bool] = lambda peer: False,
    ) -> None:
        """Wait, holding the board, until nobody is `missing`; `stuck(peer)` says that both would wait for ever."""
        board = self._board
        reporter, operation = self._reporter, self._operation
        patience = Patience(reporter, operation, self._seconds(timeout))
        if self._waiting_probe is not None:
            missing = self._waiting_probe.waiting(missing)
        while awaited := missing():
            if self._failure is not None:  # aborted by another thread
                raise reporter.aborted(self._failure, operation, patience.waited)
            if self._closed:
                raise reporter.closed(operation)
            for peer in awaited:
                departure = board.departure(peer)
                if departure is not None:
                    raise reporter.departed(departure, peer, operation, patience.waited)
                if stuck(peer):
                    calls = {self.rank: f"{operation}, waiting for rank {reporter.world_rank(peer)}"}
                    called = "an exchange" if board.awaits[peer] == self.rank else board.last_call(peer)
                    calls[peer] = f"{called}, waiting for rank {reporter.own}"
                    raise reporter.mismatch(operation, calls)
            patience.check(board.idle_of(awaited) if patience.left <= 0 else awaited)
            board.changed.wait(max(0.001, min(patience.left, 1.0)))
