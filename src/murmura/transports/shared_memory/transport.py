"""SharedMemoryTransport: processes of one host, at memory speed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from threading import get_ident, main_thread
from typing import Any, overload

import torch
from torch import Tensor

from murmura.collectives.chunks import is_small
from murmura.collectives.reduction import Reduction
from murmura.errors import ConfigError
from murmura.observe.probe import Probe
from murmura.transports import agreement
from murmura.transports.base import Async, Op, Pairs, Seconds, Sync, Transport
from murmura.transports.checks import (
    Tensors,
    bring_back,
    check_allocation,
    check_timeout,
    describe,
    describe_call,
    flatten,
)
from murmura.transports.error_reporter import ExitNotice
from murmura.transports.host import has_idle_core
from murmura.transports.profiling import is_profiled
from murmura.transports.serial_executor import Ticket
from murmura.transports.shared_memory import futex, rendezvous
from murmura.transports.shared_memory.all_reduce import all_reduce_in_segment
from murmura.transports.shared_memory.broadcast import broadcast_in_segment
from murmura.transports.shared_memory.control_block import ControlBlock, SegmentNotes, block_bytes, slots_at
from murmura.transports.shared_memory.gather import all_gather_in_segment, reduce_scatter_in_segment
from murmura.transports.shared_memory.point_to_point import MessageExchange
from murmura.transports.shared_memory.segment import Segment, create_memfd
from murmura.transports.shared_memory.session import CollectiveSession
from murmura.transports.shared_memory.small_all_reduce import Outcome, SmallAllReduce, can_prepare
from murmura.transports.shared_memory.tagged_messages import SharedMemoryMessages
from murmura.transports.stalls import StallNotes
from murmura.transports.tagged_messages import TaggedMessages
from murmura.transports.watched_store import Watch, nobody
from murmura.types import ReduceOp

__all__ = ["SharedMemoryTransport"]

NUM_PREPARED = 1024  # tensors whose small all-reduce is kept ready


class SharedMemoryTransport(Transport):
    """One rank of a world of processes on one host; made by `join`, `connect` or `run_world`."""

    device = torch.device("cpu")

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
        self._control = ControlBlock(segment, rank, blocks, life_fds, self.reporter)
        self._messages = MessageExchange(self._control)
        self._session = CollectiveSession(self._control, self._messages)
        self._small_all_reduces: dict[Any, SmallAllReduce] = {}  # by shape, dtype and operation
        self._prepared: dict[Any, tuple[SmallAllReduce, memoryview, Any]] = {}  # by address too: the views of a tensor
        self._reductions: dict[
            Any, Reduction
        ] = {}  # by operation, dtype and threads: making one takes longer than its use
        self._main_thread = main_thread().ident
        self._retire: weakref.finalize[..., Any] | None = None  # of a channel: frees its memory

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
        """Join the other ranks of `job` on this host; every rank calls it with the same job and world size.

        `timeout` bounds the rendezvous and becomes the transport's. `hosts` pretends that ranks are on several hosts.
        All ranks must know the same `secret`. `world_ranks` are the ranks in the world that this is a part of, if it is
        one, and `watch` tells of those that cannot come any more.
        """
        check_timeout(timeout, ConfigError)
        faults = []
        if not futex.is_supported():
            faults.append("shared memory between processes needs Linux. Use threads: run_world(fn, n, kind='threads').")
        if not 1 <= world_size <= rendezvous.MAX_RANKS:
            faults.append(f"world_size={world_size}: shared memory takes 1 to {rendezvous.MAX_RANKS} ranks.")
        if not 0 <= rank < world_size:
            faults.append(f"rank={rank} is not in a world of {world_size}.")
        if hosts is not None and len(hosts) != world_size:
            faults.append(f"hosts={list(hosts)}: name a host for each of the {world_size} ranks.")
        if faults:
            raise ConfigError("\n".join(faults))
        segment_fd = create_memfd(world_size) if rank == 0 else None
        try:
            met = rendezvous.meet(job, rank, world_size, segment_fd, timeout, secret=secret, watch=watch)
        finally:
            if segment_fd is not None:
                os.close(segment_fd)
        try:
            segment = Segment(met.segment_fd, rank, world_size)
            segment.take(block_bytes(world_size))  # the first range of every arena, so peers know where it is
        except BaseException:
            met.close()
            raise
        blocks = [peer * segment.arena_bytes for peer in range(world_size)]
        transport = cls(segment, rank, blocks, met.life_fds, hosts=hosts, timeout=timeout, world_ranks=world_ranks)
        transport._owns_segment = True
        # Of two ranks only the other can be at fault, and for a part of a transport the whole finds it.
        if world_ranks is None and world_size > 2:
            transport._control.notes = SegmentNotes(transport._control)
        segment.owner = transport.reporter.own
        transport._own_life = met.own_life
        return transport

    # Transport's contract

    def do_exchange(self, sends: Pairs, recvs: Pairs, timeout: float | None) -> None:
        outgoing = [(flatten(tensor, self.device), dst, describe(tensor)) for tensor, dst in sends]
        incoming = [(flatten(out, self.device, load=False), src, describe(out)) for out, src in recvs]
        seconds = self.seconds(timeout)
        self._messages.exchange(outgoing, incoming, self.operation, seconds, spin=self._may_spin())
        for (flat, _, _), (out, _) in zip(incoming, recvs, strict=True):
            bring_back(flat, out)

    def split(self, name: str, ranks: Sequence[int] | None = None) -> SharedMemoryTransport | None:
        members = self.split_members(ranks)
        if members is None:
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
            **self.split_options(name, members),
        )
        split._control.notes = self._control.notes
        retire = weakref.finalize(split, _retire, split._control, split._session)  # also if it is only dropped
        retire.atexit = False
        split._retire = retire
        self.keep_split(split, members)
        return split

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        check_allocation(numel, dtype, device)
        if torch.device(device).type != "cpu" or self.world_size == 1:
            return super().allocate(numel, dtype, device)
        self.check_usable()
        return self._segment.allocate(numel, dtype)

    def tagged_messages(self) -> TaggedMessages:
        channel = self.channel("tagged messages")
        assert isinstance(channel, SharedMemoryTransport)
        return SharedMemoryMessages(channel)

    def use_stall_notes(self, notes: StallNotes) -> None:
        """Find out who is at fault for a wait that timed out from `notes`, those of a world on several hosts."""
        self._control.notes = notes

    def has_spare_core(self) -> bool:
        return has_idle_core(self._segment.world_size)

    def absent_peers(self) -> list[int]:
        absent = [] if self.closed else self._session.absent_peers()
        return [self.reporter.world_rank(peer) for peer in absent]

    def observe_waiting(self, probe: Probe | None) -> None:
        self._control.probe = probe

    def on_abort(self, error: BaseException) -> None:
        self._control.failure = error
        self._control.announce_exit(ExitNotice.of(error, self.reporter.own))

    def after_fork(self) -> None:
        super().after_fork()
        self._control.failure = self.failure
        if self._retire is not None:
            self._retire.detach()

    def on_close(self) -> None:
        self._control.closed = True

    def release(self) -> None:
        self._prepared.clear()
        self._small_all_reduces.clear()
        self._control.announce_exit(self.exit_notice())  # not before: peers may wait for what was queued here
        self._control.failure = None  # whose traceback would keep all this alive
        if self._retire is not None:
            self._retire()
        if self._owns_segment:
            for fd in (*self._life_fds, self._own_life):
                if fd >= 0:
                    os.close(fd)
            self._segment.close()

    # All-reduce

    @overload
    def all_reduce(
        self, tensor: Tensor, op: Op = ..., *, out: Tensor | None = ..., async_op: Sync = ..., timeout: Seconds = ...
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self, tensor: Tensor, op: Op = ..., *, out: Tensor | None = ..., async_op: Async, timeout: Seconds = ...
    ) -> Ticket: ...
    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        if timeout is not None:
            check_timeout(timeout)
        if out is None and not async_op:
            prepared = self._find_prepared(tensor, op)
            if prepared is not None and self.run_prepared(prepared, timeout):
                return tensor
        if async_op:
            return super().all_reduce(tensor, op, out=out, async_op=True, timeout=timeout)
        result = super().all_reduce(tensor, op, out=out, timeout=timeout)
        if out is None and self.world_size > 1 and can_prepare(tensor, self.world_size):
            self._prepare(tensor, ReduceOp(op))
        return result

    def prepared_all_reduce(self, tensor: Tensor, op: ReduceOp) -> Any:
        return self._prepared.get((tensor.data_ptr(), tensor.shape, tensor.dtype, op))

    def prepared_elsewhere(self, prepared: Any, address: int) -> Any:
        small, _, _ = prepared
        return small, *small.views(address)

    def _find_prepared(self, tensor: Tensor, op: ReduceOp | str) -> Any:
        """What `run_prepared` needs for a tensor that was reduced before, or is like one that was; None if neither."""
        try:
            address = tensor.data_ptr()
        except (AttributeError, RuntimeError):  # what has no address is refused later
            return None
        kind = (tensor.shape, tensor.dtype, op)
        prepared = self._prepared.get((address, *kind))
        small = self._small_all_reduces.get(kind) if prepared is None else None
        if prepared is None and small is None:
            return None
        if not tensor.is_contiguous() or tensor.is_neg() or not tensor.is_cpu:
            return None
        return prepared if small is None else self._keep(address, kind, small)

    def run_prepared(self, prepared: Any, timeout: float | None) -> bool:
        executor = self._executor
        if not executor.idle or self._probe is not None or is_profiled() or get_ident() != self._main_thread:
            return False
        if self._listeners.members:
            self.announce()
        small, source, result = prepared
        with executor.lock:
            if self.failure is not None or self.closed:
                self.check_usable(f"all_reduce #{self.num_collectives + 1}")
            try:
                number = self.num_collectives = self.num_collectives + 1
                outcome = small.run(number, source, result)
                if outcome is not Outcome.DONE:
                    session = self._begin(timeout, f"all_reduce #{number}")
                    if outcome is Outcome.ALONE:
                        session.await_entry()
                        outcome = small.finish(number, result)
                    if outcome is Outcome.DISAGREED:
                        session.disagree(small.call)
            except BaseException as error:
                self.abort(error)
                raise
        return True

    def _prepare(self, tensor: Tensor, op: ReduceOp) -> None:
        kind = (tensor.shape, tensor.dtype, op)
        small = self._small_all_reduces.get(kind)
        if small is None:
            if len(self._small_all_reduces) >= NUM_PREPARED:
                self._small_all_reduces.clear()
            small = SmallAllReduce(self._control, tensor, op, describe_call("all_reduce", op, tensor))
            self._small_all_reduces[kind] = small
        self._keep(tensor.data_ptr(), kind, small)

    def _keep(self, address: int, kind: tuple[Any, ...], small: SmallAllReduce) -> Any:
        if len(self._prepared) >= NUM_PREPARED:
            self._prepared.clear()
        prepared = self._prepared[(address, *kind)] = (small, *small.views(address))
        return prepared

    def all_reduce_flat(
        self, flat_in: Tensor, flat_out: Tensor, op: ReduceOp, call: str, timeout: float | None
    ) -> None:
        session = self._begin(timeout)
        threaded = not is_small(flat_in.nbytes, self.world_size) and session.num_threads > 1
        reduction = self._reduction(op, flat_in.dtype, threaded)
        all_reduce_in_segment(session, flat_in, flat_out, reduction, call)

    def broadcast_flat(self, flat: Tensor, src: int, call: str, timeout: float | None) -> None:
        broadcast_in_segment(self._begin(timeout), flat.view(torch.uint8), src, call)

    def all_gather_flat(self, parts: Tensors, own: Tensor, call: str, timeout: float | None) -> None:
        all_gather_in_segment(self._begin(timeout), parts, own, call)

    def reduce_scatter_flat(self, out: Tensor, parts: Tensors, op: ReduceOp, call: str, timeout: float | None) -> None:
        reduce_scatter_in_segment(self._begin(timeout), out, parts, self._reduction(op, out.dtype), call)

    def _reduction(self, op: ReduceOp, dtype: torch.dtype, threaded: bool = False) -> Reduction:
        reduction = self._reductions.get((op, dtype, threaded))
        if reduction is None:
            reduction = Reduction(op, dtype, self.world_size, self.device, threaded=threaded)
            self._reductions[op, dtype, threaded] = reduction
        return reduction

    def do_barrier(self, timeout: float | None) -> None:
        self.compare_calls("barrier()", timeout)

    def compare_calls(self, call: str, timeout: float | None) -> None:
        if self.world_size > 1:
            self._begin(timeout).enter(call)

    def _begin(self, timeout: float | None, operation: str = "") -> CollectiveSession:
        """The session of the collective under way."""
        spin = self._may_spin()
        self._session.begin(self.num_collectives, operation or self.operation, self.seconds(timeout), spin=spin)
        return self._session

    def _may_spin(self) -> bool:
        """Only the main thread may: a thread that spins in Python takes the interpreter from the one that computes."""
        return get_ident() == self._main_thread


def _retire(control: ControlBlock, session: CollectiveSession) -> None:
    """Leave a channel for good; its memory is freed once the other ranks have left it, too."""
    control.leave(ExitNotice(control.reporter.own))
    control.segment.retire(control.is_deserted, [control.blocks[control.rank], *session.staging_places()])
