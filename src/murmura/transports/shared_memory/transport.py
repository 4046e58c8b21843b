"""SharedMemoryTransport: processes of one host, at memory speed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident, main_thread
from typing import Any

import torch
from torch import Tensor

from murmura.collectives.reduction import Reduction
from murmura.errors import ConfigError
from murmura.observe.probe import Probe
from murmura.transports import agreement
from murmura.transports.base import Pairs, Transport
from murmura.transports.checks import check_members, check_timeout, describe, store
from murmura.transports.failures import Departure
from murmura.transports.order import Ticket
from murmura.transports.shared_memory import admission, futex, reducing
from murmura.transports.shared_memory.board import Board, block_bytes, slots_at
from murmura.transports.shared_memory.mail import Mail
from murmura.transports.shared_memory.meeting import Meeting
from murmura.transports.shared_memory.one_shot import OneShot, Outcome, can_prepare
from murmura.transports.shared_memory.segment import Segment, create_memfd
from murmura.transports.watched_store import Watch, nobody
from murmura.types import ReduceOp

__all__ = ["SharedMemoryTransport"]

NUM_PREPARED = 1024  # tensors whose small all-reduce is kept ready


class SharedMemoryTransport(Transport):
    """One rank of a world of processes on one host; made by `join`, `connect` or `run_world`."""

    _works_on = torch.device("cpu")

    def __init__(
        self,
        segment: Segment,
        rank: int,
        blocks: Sequence[int],
        life_fds: Sequence[int],
        *,
        hosts: Sequence[int] | None = None,
        timeout: float = 600.0,
        name: str = "",
        world_ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, len(blocks), hosts=hosts, timeout=timeout, name=name, world_ranks=world_ranks)
        self._segment = segment
        self._life_fds = life_fds
        self._owns_segment = False  # a channel shares its parent's, and the signs of life
        self._own_life = -1
        self._board = Board(segment, rank, blocks, life_fds, self._reporter)
        self._mail = Mail(self._board)
        self._meeting = Meeting(self._board, self._mail)
        self._one_shots: dict[Any, OneShot] = {}  # by shape, dtype and operation
        self._prepared: dict[Any, tuple[OneShot, memoryview, Any]] = {}  # by address too: the views of a tensor
        self._main_thread = main_thread().ident
        self._retire: Callable[[], object] | None = None  # of a channel: frees its memory

    @classmethod
    def join(
        cls,
        job: str,
        rank: int,
        world_size: int,
        *,
        hosts: Sequence[int] | None = None,
        timeout: float = 600.0,
        secret: str = "",
        world_ranks: Sequence[int] | None = None,
        watch: Watch = nobody,
    ) -> SharedMemoryTransport:
        """Meet the other ranks of `job` on this host; every rank calls it with the same job and world size.

        `timeout` bounds the meeting and becomes the transport's. `hosts` pretends that ranks are on several hosts.
        All ranks must know the same `secret`. `world_ranks` are the ranks in the world that this is a part of, if it is
        one, and `watch` tells of those that cannot come any more.
        """
        check_timeout(timeout, ConfigError)
        faults = []
        if not futex.is_supported():
            faults.append("shared memory between processes needs Linux. Use threads: run_world(fn, n, kind='threads').")
        if not 1 <= world_size <= admission.MAX_RANKS:
            faults.append(f"world_size={world_size}: shared memory takes 1 to {admission.MAX_RANKS} ranks.")
        if not 0 <= rank < world_size:
            faults.append(f"rank={rank} is not in a world of {world_size}.")
        if hosts is not None and len(hosts) != world_size:
            faults.append(f"hosts={list(hosts)}: name a host for each of the {world_size} ranks.")
        if faults:
            raise ConfigError("\n".join(faults))
        segment_fd = create_memfd(world_size) if rank == 0 else None
        try:
            admitted = admission.admit(job, rank, world_size, segment_fd, timeout, secret=secret, watch=watch)
        finally:
            if segment_fd is not None:
                os.close(segment_fd)
        segment = Segment(admitted.segment_fd, rank, world_size)
        segment.take(block_bytes(world_size))  # the first range of every arena, so peers know where it is
        blocks = [peer * segment.arena_bytes for peer in range(world_size)]
        transport = cls(segment, rank, blocks, admitted.life_fds, hosts=hosts, timeout=timeout, world_ranks=world_ranks)
        transport._owns_segment = True
        segment.owner = transport._reporter.own
        transport._own_life = admitted.own_life
        return transport

    # Transport's contract

    def exchange(
        self, sends: Pairs, recvs: Pairs, *, async_op: bool = False, timeout: float | None = None
    ) -> Ticket | None:
        self._check_pairs(sends, recvs, timeout)

        def work() -> None:
            outgoing = [(self._flat(tensor, load=True), dst, describe(tensor)) for tensor, dst in sends]
            incoming = [(self._flat(out, load=False), src, describe(out)) for out, src in recvs]
            seconds = self._seconds(timeout)
            self._mail.exchange(outgoing, incoming, self._operation, seconds, spin=self._may_spin())
            for (flat, _, _), (out, _) in zip(incoming, recvs, strict=True):
                store(flat, out)

        return self._operate("exchange", work, async_op, self._sent(sends))  # type: ignore[no-any-return]

    def split(self, name: str, ranks: Sequence[int] | None = None) -> SharedMemoryTransport | None:
        members = tuple(range(self.world_size)) if ranks is None else tuple(ranks)
        check_members(members, self.world_size)
        self._check_usable()
        if self.rank not in members:
            return None
        place = self._segment.take(block_bytes(len(members)))
        self._segment.bytes[place : place + slots_at(len(members))] = 0  # a tensor may have lain there
        # Members tell each other where their blocks are.
        places = agreement.on_split(self, name, members, place)
        split = SharedMemoryTransport(
            self._segment,
            members.index(self.rank),
            places,
            [self._life_fds[peer] for peer in members],
            hosts=[self.hosts[peer] for peer in members],
            timeout=self.timeout,
            name=f"{self.name}/{name}",
            world_ranks=[self.world_ranks[peer] for peer in members],
        )
        retire = weakref.finalize(split, _retire, split._board, split._meeting)  # also if it is only dropped
        retire.atexit = False
        split._retire = retire
        self._keep(split, members)
        return split

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        if torch.device(device).type != "cpu" or self.world_size == 1:
            return super().allocate(numel, dtype, device)
        self._check_usable()
        return self._segment.allocate(numel, dtype)

    def _observe_waiting(self, probe: Probe | None) -> None:
        self._board.probe = probe

    def abort(self, error: BaseException) -> None:
        if self._failure is None:
            super().abort(error)
            self._board.failure = error
            self._board.depart(Departure.of(error, self._reporter.own))
            for split in list(self._splits):
                split.abort(error)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = self._board.closed = True
        for split in list(self._splits):
            split.close()
        self._order.close()
        self._prepared.clear()
        self._one_shots.clear()
        self._board.depart(self._parting())
        self._board.failure = None  # whose traceback would keep all this alive
        if self._retire is not None:
            self._retire()
        if self._owns_segment:
            for fd in (*self._life_fds, self._own_life):
                if fd >= 0:
                    os.close(fd)
            self._segment.close()

    # All-reduce

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Tensor | Ticket:
        check_timeout(timeout)
        if self._listeners.members:
            self.announce()
        if out is None and not async_op:
            try:
                prepared = self._prepared.get((tensor.data_ptr(), tensor.shape, tensor.dtype, op))
            except RuntimeError:  # a sparse tensor has no address; it is refused below
                prepared = None
            if (
                prepared is not None
                and tensor.is_contiguous()
                and not tensor.is_neg()
                and self._order.idle
                and self._probe is None
                and get_ident() == self._main_thread
            ):
                with self._order.lock:
                    self._fire(*prepared, timeout)
                return tensor
        result = super().all_reduce(tensor, op, out=out, async_op=async_op, timeout=timeout)
        if out is None and not async_op and self.world_size > 1 and can_prepare(tensor, self.world_size):
            self._prepare(tensor, ReduceOp(op))
        return result

    def _prepare(self, tensor: Tensor, op: ReduceOp) -> None:
        if len(self._prepared) >= NUM_PREPARED:
            self._prepared.clear()
            self._one_shots.clear()
        kind = (tensor.shape, tensor.dtype, op)
        shot = self._one_shots.get(kind)
        if shot is None:
            shot = self._one_shots[kind] = OneShot(self._board, tensor, op, f"all_reduce({op}) of {describe(tensor)}")
        self._prepared[tensor.data_ptr(), *kind] = (shot, *shot.views(tensor))

    def _fire(self, shot: OneShot, source: memoryview, result: Any, timeout: float | None) -> None:
        if self._failure is not None or self._closed:
            self._check_usable(f"all_reduce #{self._num_collectives + 1}")
        try:
            number = self._num_collectives = self._num_collectives + 1
            outcome = shot.fire(number, source, result)
            if outcome is not Outcome.DONE:
                meeting = self._begin(timeout, f"all_reduce #{number}")
                if outcome is Outcome.ALONE:
                    meeting.await_entry()
                    outcome = shot.finish(number, result)
                if outcome is Outcome.DISAGREED:
                    meeting.disagree(shot.call)
        except BaseException as error:
            self.abort(error)
            raise

    def _all_reduce(self, flat_in: Tensor, flat_out: Tensor, op: ReduceOp, call: str, timeout: float | None) -> None:
        reduction = Reduction(op, flat_in.dtype, self.world_size, flat_in.device)
        reducing.all_reduce(self._begin(timeout), flat_in, flat_out, reduction, "all_reduce" + call)

    def _broadcast(self, flat: Tensor, src: int, call: str, timeout: float | None) -> None:
        reducing.broadcast(self._begin(timeout), flat.view(torch.uint8), src, "broadcast" + call)

    def _barrier(self, timeout: float | None) -> None:
        self._agree("barrier()", timeout)

    def _agree(self, call: str, timeout: float | None) -> None:
        if self.world_size > 1:
            self._begin(timeout).enter(call)

    def _begin(self, timeout: float | None, operation: str = "") -> Meeting:
        """Turn to the collective under way."""
        spin = self._may_spin()
        self._meeting.begin(self._num_collectives, operation or self._operation, self._seconds(timeout), spin=spin)
        return self._meeting

    def _may_spin(self) -> bool:
        """Only the main thread may: a thread that spins in Python takes the interpreter from the one that computes."""
        return get_ident() == self._main_thread


def _retire(board: Board, meeting: Meeting) -> None:
    """Leave a channel for good; its memory is freed once the other ranks have left it, too."""
    board.leave(Departure(board.reporter.own))
    board.segment.retire(board.is_deserted, [board.blocks[board.rank], *meeting.staging_places()])
