"""SharedMemoryTransport: processes of one host, at memory speed.

Small messages are copied through slots (`one_shot`). Large ones in memory from `allocate` are reduced where they lie;
any other goes through a staging area: in a pipeline of pieces between two ranks, in blocks between more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from murmura.collectives.chunks import PIECE_BYTES, chunk_bounds, is_small, plan_segments
from murmura.collectives.direct import push
from murmura.collectives.reduction import Reduction
from murmura.errors import ConfigError, TransportError
from murmura.transports.base import Pairs, Transport, _describe, _store
from murmura.transports.failures import Departure, mismatch
from murmura.transports.in_process import check_members
from murmura.transports.order import Ticket
from murmura.transports.shared_memory import admission, futex
from murmura.transports.shared_memory.board import (
    CALLED,
    DIGEST,
    ENTERED,
    PHASE,
    PIECES,
    PLACE_IN,
    PLACE_OUT,
    Board,
    block_bytes,
    digest_of,
    slot_bytes,
)
from murmura.transports.shared_memory.mail import Mail
from murmura.transports.shared_memory.one_shot import OneShot, can_prepare
from murmura.transports.shared_memory.segment import Segment, create_memfd
from murmura.types import ReduceOp

__all__ = ["SharedMemoryTransport"]

STAGING_BYTES = 64 * 2**20  # at most, for a rank; longer messages go in blocks of this
PIECES_AHEAD = 2
NUM_PREPARED = 1024
TABLE_SECONDS = 2.0  # how long a rank waits for the others' part of the table of a mismatch


class SharedMemoryTransport(Transport):
    """One rank of a world of processes on one host; made by `join`, `connect` or `run_world`."""

    _stages_on_host = True

    def __init__(
        self,
        segment: Segment,
        rank: int,
        blocks: Sequence[int],
        pidfds: Sequence[int],
        *,
        hosts: Sequence[int] | None = None,
        timeout: float = 600.0,
        name: str = "",
    ) -> None:
        super().__init__(rank, len(blocks), hosts=hosts, timeout=timeout, name=name)
        self._segment = segment
        self._pidfds = pidfds
        self._owns_segment = False
        self._board = Board(segment, rank, blocks, pidfds)
        self._mail = Mail(self._board)
        self._phase = 0
        self._staging = (-1, 0)  # place and size
        self._outgrown: list[int] = []  # staging areas that a peer may still be reading
        self._splits: list[SharedMemoryTransport] = []
        self._prepared: dict[Any, OneShot] = {}

    @classmethod
    def join(
        cls,
        job: str,
        rank: int,
        world_size: int,
        *,
        hosts: Sequence[int] | None = None,
        timeout: float = 600.0,
    ) -> SharedMemoryTransport:
        """Meet the other ranks of `job` on this host; every rank calls it with the same job and world size.

        `timeout` bounds the meeting and becomes the transport's. `hosts` pretends that ranks are on several hosts.
        """
        faults = []
        if not futex.is_supported():
            faults.append("shared memory needs Linux 5.3 or newer. Use threads: run_world(fn, n, kind='threads').")
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
            admitted = admission.admit(job, rank, world_size, segment_fd, timeout)
        finally:
            if segment_fd is not None:
                os.close(segment_fd)
        segment = Segment(admitted.segment_fd, rank, world_size)
        segment.take(block_bytes(world_size))  # the first range of every arena, so peers know where it is
        blocks = [peer * segment.arena_bytes for peer in range(world_size)]
        transport = cls(segment, rank, blocks, admitted.pidfds, hosts=hosts, timeout=timeout)
        transport._owns_segment = True
        return transport

    # Transport's contract

    def exchange(
        self, sends: Pairs, recvs: Pairs, *, async_op: bool = False, timeout: float | None = None
    ) -> Ticket | None:
        self._check_pairs(sends, recvs)

        def work() -> None:
            outgoing = [(self._flat(tensor, load=True), dst, _describe(tensor)) for tensor, dst in sends]
            incoming = [(self._flat(out, load=False), src, _describe(out)) for out, src in recvs]
            seconds = self._seconds(timeout)
            self._mail.exchange(outgoing, incoming, self._operation, seconds, spin=self._may_spin())
            for (flat, _, _), (out, _) in zip(incoming, recvs, strict=True):
                _store(flat, out)

        return self._run("exchange", work, async_op)  # type: ignore[no-any-return]

    def split(self, name: str, ranks: Sequence[int] | None = None) -> SharedMemoryTransport | None:
        members = tuple(range(self.world_size)) if ranks is None else tuple(ranks)
        check_members(self, members)
        self._check_usable()
        if self.rank not in members:
            return None
        place = self._segment.take(block_bytes(len(members)))
        # Members tell each other where their blocks are, and what they believe to be splitting.
        own = torch.tensor([place, digest_of(f"split {name} {members}")])
        told = {peer: torch.zeros(2, dtype=torch.int64) for peer in members if peer != self.rank}
        self.exchange([(own, peer) for peer in told], [(theirs, peer) for peer, theirs in told.items()])
        told[self.rank] = own
        if any(each[1] != own[1] for each in told.values()):
            calls = {peer: f"split with digest {int(told[peer][1]):x}" for peer in members}
            calls[self.rank] += f": {name!r} of ranks {list(members)}"
            raise mismatch(self.rank, "split", calls)
        split = SharedMemoryTransport(
            self._segment,
            members.index(self.rank),
            [int(told[peer][0]) for peer in members],
            [self._pidfds[peer] for peer in members],
            hosts=[self.hosts[peer] for peer in members],
            timeout=self.timeout,
            name=f"{self.name}/{name}",
        )
        self._splits.append(split)
        return split

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        if torch.device(device).type != "cpu" or self.world_size == 1:
            return super().allocate(numel, dtype, device)
        self._check_usable()
        return self._segment.allocate(numel, dtype)

    def abort(self, error: BaseException) -> None:
        if self._failure is None:
            super().abort(error)
            self._board.depart(Departure.of(error))
            for split in self._splits:
                split.abort(TransportError(f"{type(error).__name__}: {error}"))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = self._board.closed = True
        for split in self._splits:
            split.close()
        self._order.close()
        self._board.depart(Departure())
        self._prepared.clear()
        if self._owns_segment:
            for fd in self._pidfds:
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
        if out is None and not async_op:
            shot = self._prepared.get((tensor.data_ptr(), tensor.shape, tensor.dtype, op))
            order = self._order
            if shot is not None and tensor.is_contiguous() and order.idle and order.lock.acquire(blocking=False):
                try:
                    self._fire(shot, timeout)
                finally:
                    order.lock.release()
                return tensor
        result = super().all_reduce(tensor, op, out=out, async_op=async_op, timeout=timeout)
        if out is None and not async_op and self.world_size > 1 and can_prepare(tensor, self.world_size):
            self._prepare(tensor, ReduceOp(op))
        return result

    def _prepare(self, tensor: Tensor, op: ReduceOp) -> None:
        if len(self._prepared) >= NUM_PREPARED:
            self._prepared.clear()
        call = f"all_reduce({op}) of {_describe(tensor)}"
        self._prepared[tensor.data_ptr(), tensor.shape, tensor.dtype, op] = OneShot(self._board, tensor, op, call)

    def _fire(self, shot: OneShot, timeout: float | None) -> None:
        if self._failure is not None or self._closed:
            self._check_usable()
        number = self._num_collectives = self._num_collectives + 1
        try:
            shot.publish(number)
            if not shot.arrived(number):
                self._await_entry(f"all_reduce #{number}", number, timeout)
            if not shot.agreed(number):
                self._disagree(f"all_reduce #{number}", number, shot.call)
            shot.reduce(number)
        except BaseException as error:
            self.abort(error)
            raise

    def _all_reduce(self, flat_in: Tensor, flat_out: Tensor, op: ReduceOp, call: str, timeout: float | None) -> None:
        reduction = Reduction(op, flat_in.dtype, self.world_size, flat_in.device)
        call = "all_reduce" + call
        if is_small(flat_in.nbytes, self.world_size):
            self._reduce_slots(flat_in, flat_out, reduction, call, timeout)
            return
        own_in, own_out = self._segment.place_of(flat_in), self._segment.place_of(flat_out)
        staged = own_in < 0 or own_out < 0
        if staged:
            own_in = own_out = ~self._stage(flat_in.nbytes)
        self._enter(call, timeout, own_in, own_out)
        places_in, places_out = self._places(PLACE_IN), self._places(PLACE_OUT)
        if all(place >= 0 for place in places_in):
            share = chunk_bounds(flat_in.numel(), self.world_size, self.rank)
            self._push(flat_in, reduction, places_in, places_out, share, timeout)
        elif self.world_size == 2 and all(place < 0 for place in places_in):
            self._reduce_in_pipeline(flat_in, flat_out, reduction, ~places_in[1 - self.rank], timeout)
        else:
            self._reduce_in_blocks(flat_in, flat_out, reduction, places_in, places_out, timeout)

    def _reduce_slots(
        self, flat_in: Tensor, flat_out: Tensor, reduction: Reduction, call: str, timeout: float | None
    ) -> None:
        segment, slots = self._segment, self._board.slots[self._num_collectives & 1]
        numel, dtype = flat_in.numel(), flat_in.dtype
        inputs = [segment.tensor(place, numel, dtype) for place in slots]
        inputs[self.rank].copy_(flat_in)
        self._enter(call, timeout)
        reduction.reduce([reduction.array(each) for each in inputs], reduction.array(flat_out))

    def _push(
        self,
        like: Tensor,
        reduction: Reduction,
        places_in: Sequence[int],
        places_out: Sequence[int],
        share: tuple[int, int],
        timeout: float | None,
    ) -> None:
        """Reduce elements `share` of buffers that all lie in the segment, and meet when everybody has."""
        numel, dtype = like.numel(), like.dtype
        inputs = [reduction.array(self._segment.tensor(place, numel, dtype)) for place in places_in]
        same = places_out == places_in
        outputs = (
            inputs if same else [reduction.array(self._segment.tensor(place, numel, dtype)) for place in places_out]
        )
        segments = plan_segments(numel, dtype.itemsize, self.world_size, *share)
        push(inputs, outputs, self.rank, segments, reduction)
        self._sync(timeout)

    def _reduce_in_pipeline(
        self, flat_in: Tensor, flat_out: Tensor, reduction: Reduction, peer_place: int, timeout: float | None
    ) -> None:
        """Two ranks: each stages its pieces in order and adds the other's as they come."""
        numel, dtype = flat_in.numel(), flat_in.dtype
        own_in, own_out = reduction.array(flat_in), reduction.array(flat_out)
        size = self._staging[1] // dtype.itemsize
        staging = reduction.array(self._segment.tensor(self._staging[0], size, dtype))
        theirs = reduction.array(self._segment.tensor(peer_place, size, dtype))
        step = PIECE_BYTES // dtype.itemsize
        tag = self._num_collectives << 24
        num_staged = num_added = 0
        for low in range(0, numel, size):
            high = min(low + size, numel)
            pieces = [(at, min(at + step, high)) for at in range(low, high, step)]
            for turn in range(len(pieces) + PIECES_AHEAD):
                if turn < len(pieces):
                    start, stop = pieces[turn]
                    staging[start - low : stop - low] = own_in[start:stop]
                    num_staged += 1
                    self._board.publish(PIECES, tag | num_staged)
                if turn >= PIECES_AHEAD:
                    start, stop = pieces[turn - PIECES_AHEAD]
                    num_added += 1
                    self._await_word(1 - self.rank, PIECES, tag | num_added, timeout)
                    reduction.reduce((own_in[start:stop], theirs[start - low : stop - low]), own_out[start:stop])
            if high < numel:
                self._sync(timeout)  # the staging areas start anew

    def _reduce_in_blocks(
        self,
        flat_in: Tensor,
        flat_out: Tensor,
        reduction: Reduction,
        places_in: Sequence[int],
        places_out: Sequence[int],
        timeout: float | None,
    ) -> None:
        """Ranks whose buffer is elsewhere bring it to their staging area, block by block; the rest is as in `_push`."""
        numel, dtype = flat_in.numel(), flat_in.dtype
        staged = places_in[self.rank] < 0
        size = STAGING_BYTES // dtype.itemsize
        for low in range(0, numel, size):
            high = min(low + size, numel)
            mine = self._segment.tensor(self._staging[0], high - low, dtype) if staged else None
            if mine is not None:
                mine.copy_(flat_in[low:high])
            self._sync(timeout)
            start, stop = chunk_bounds(high - low, self.world_size, self.rank)
            segments = plan_segments(numel, dtype.itemsize, self.world_size, low + start, low + stop)
            push(
                [self._block(reduction, place, low, high, dtype) for place in places_in],
                [self._block(reduction, place, low, high, dtype) for place in places_out],
                self.rank,
                [segment._replace(start=segment.start - low, stop=segment.stop - low) for segment in segments],
                reduction,
            )
            self._sync(timeout)
            if mine is not None:
                flat_out[low:high].copy_(mine)

    def _block(self, reduction: Reduction, place: int, low: int, high: int, dtype: torch.dtype) -> Any:
        start = ~place if place < 0 else place + low * dtype.itemsize
        return reduction.array(self._segment.tensor(start, high - low, dtype))

    # Broadcast and barrier

    def _broadcast(self, flat: Tensor, src: int, call: str, timeout: float | None) -> None:
        call = "broadcast" + call
        segment, raw = self._segment, flat.view(torch.uint8)
        if raw.numel() <= slot_bytes(self.world_size):
            slot = self._board.slots[self._num_collectives & 1][src]
            if self.rank == src:
                segment.tensor(slot, raw.numel(), torch.uint8).copy_(raw)
            self._enter(call, timeout)
            if self.rank != src:
                raw.copy_(segment.tensor(slot, raw.numel(), torch.uint8))
            return
        place = segment.place_of(flat)
        if self.rank == src and place < 0:
            place = ~self._stage(flat.nbytes)
        self._enter(call, timeout, place, place)
        place = self._places(PLACE_IN)[src]
        if place < 0:
            self._broadcast_in_pipeline(raw, src, ~place, timeout)
        elif self.rank != src:
            raw.copy_(segment.tensor(place, raw.numel(), torch.uint8))
        self._sync(timeout)

    def _broadcast_in_pipeline(self, raw: Tensor, src: int, place: int, timeout: float | None) -> None:
        tag = self._num_collectives << 24
        num_pieces = 0
        for low in range(0, raw.numel(), STAGING_BYTES):
            if low:
                self._sync(timeout)  # the staging area starts anew
            high = min(low + STAGING_BYTES, raw.numel())
            for start in range(low, high, PIECE_BYTES):
                stop = min(start + PIECE_BYTES, high)
                piece = self._segment.tensor(place + start - low, stop - start, torch.uint8)
                num_pieces += 1
                if self.rank == src:
                    piece.copy_(raw[start:stop])
                    self._board.publish(PIECES, tag | num_pieces)
                else:
                    self._await_word(src, PIECES, tag | num_pieces, timeout)
                    raw[start:stop].copy_(piece)

    def _barrier(self, timeout: float | None) -> None:
        self._enter("barrier()", timeout)

    # Meeting

    def _enter(self, call: str, timeout: float | None, place_in: int = 0, place_out: int = 0) -> None:
        """Enter the collective under way; return when all have, and have called the same."""
        board, number = self._board, self._num_collectives
        words, parity, digest = board.words, number & 1, digest_of(call)
        words[board.own + DIGEST + parity] = digest
        words[board.own + PLACE_IN + parity] = place_in
        words[board.own + PLACE_OUT + parity] = place_out
        board.publish(ENTERED, number)
        self._await_entry(self._operation, number, timeout)
        if any(board.read(peer, DIGEST + parity) != digest for peer in board.peers):
            self._disagree(self._operation, number, call)
        # All have entered, so all have left the collective before: nobody reads an old staging area any more.
        while self._outgrown:
            self._segment.give_back(self._outgrown.pop())

    def _await_entry(self, operation: str, number: int, timeout: float | None) -> None:
        board = self._board
        board.wait(
            lambda: [peer for peer in board.peers if board.read(peer, ENTERED) < number],
            operation,
            self._seconds(timeout),
            spin=self._may_spin(),
            stuck=self._mail.awaits_in_vain,
        )
        if not futex.ORDERED_STORES:
            board.fence()

    def _sync(self, timeout: float | None) -> None:
        """Meet again inside a collective."""
        board = self._board
        self._phase += 1
        phase = self._phase
        board.publish(PHASE, phase)
        board.wait(
            lambda: [peer for peer in board.peers if board.read(peer, PHASE) < phase],
            self._operation,
            self._seconds(timeout),
            spin=self._may_spin(),
        )
        if not futex.ORDERED_STORES:
            board.fence()

    def _await_word(self, peer: int, word: int, value: int, timeout: float | None) -> None:
        board = self._board
        at = board.at[peer] + word
        words = board.words
        if words[at] < value:
            board.wait(
                lambda: [peer] if words[at] < value else [],
                self._operation,
                self._seconds(timeout),
                spin=self._may_spin(),
            )
        if not futex.ORDERED_STORES:
            board.fence()

    def _disagree(self, operation: str, number: int, call: str) -> None:
        """Tell what this rank called, hear what the others did, and raise the table."""
        board = self._board
        board.tell_call(number, call)
        give_up = time.monotonic() + TABLE_SECONDS
        calls = {self.rank: call}
        for peer in board.peers:
            while board.read(peer, CALLED) < number and time.monotonic() < give_up:
                os.sched_yield()
            calls[peer] = board.told_call(peer) if board.read(peer, CALLED) == number else "(did not say)"
        raise mismatch(self.rank, operation, calls)

    def _places(self, word: int) -> list[int]:
        word += self._num_collectives & 1
        return [self._board.read(rank, word) for rank in range(self.world_size)]

    def _stage(self, num_bytes: int) -> int:
        """The place of this rank's staging area, for a message of so many bytes or a block of it."""
        place, size = self._staging
        wanted = min(STAGING_BYTES, max(num_bytes, 2**20))
        if size < wanted:
            if place >= 0:
                self._outgrown.append(place)
            self._staging = place, _ = self._segment.take(wanted), wanted
        return place

    def _may_spin(self) -> bool:
        return not self._order.in_thread()
