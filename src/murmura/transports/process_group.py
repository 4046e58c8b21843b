"""ProcessGroupTransport: ranks anywhere, over a torch.distributed process group (Gloo, NCCL, or any other).

A group of murmura's own is built on a store, beside those of the user, and is never the default one. What a group can
do, it does; the rest is built on `exchange`. Its failures are translated: who, in which operation, and why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from murmura.collectives.deadline import Deadline
from murmura.collectives.reduction import divide
from murmura.errors import ConfigError, PeerTimeout, RendezvousError, TransportError, UsageError
from murmura.transports import agreement, group_operations, own_groups
from murmura.transports.base import Pairs, Transport
from murmura.transports.challenge import prove_to_each_other
from murmura.transports.checks import Check, bring_back, check_timeout, describe_exchange, flatten
from murmura.transports.cuda_launches import CudaLaunches, Launch
from murmura.transports.error_reporter import ExitNotice, Reporter
from murmura.transports.failure_log import FailureLog, is_timeout
from murmura.transports.group_building import build_group
from murmura.transports.launching import LaunchingTransport
from murmura.transports.liveness import Liveness
from murmura.transports.process_group_messages import ProcessGroupMessages, Streams
from murmura.transports.rendezvous import Roster, Store, sign_in, under
from murmura.transports.serial_executor import Ticket
from murmura.transports.signed_store import SignedStore
from murmura.transports.stalls import StallNotes, WaitDeadline
from murmura.transports.tagged_messages import TaggedMessages
from murmura.transports.user_group import place_in
from murmura.transports.watched_store import Watch, nobody
from murmura.types import ReduceOp, parse

__all__ = ["Check", "ProcessGroupTransport"]


class ProcessGroupTransport(LaunchingTransport):
    """One rank of a process group; made from a group that exists, or by `join` from a store.

    `check="always"` compares the ranks' calls before every operation. `store`, if the group's own cannot be asked
    for, is what ranks leave word in when they fail; without one a failure has no name, and `split` is refused.
    """

    def __init__(
        self,
        process_group: Any,
        *,
        check: str = "best_effort",
        store: Store | None = None,
        timeout: float = 600.0,
        roster: Roster | None = None,
        name: str = "",
    ) -> None:
        super().__init__(
            *place_in(process_group),
            hosts=roster.hosts if roster else None,
            timeout=timeout,
            name=name,
            world_ranks=roster.world_ranks if roster else None,
        )
        rank, world_size = self.rank, self.world_size
        self.check = parse(Check, check, "check")
        self._group = process_group
        self._kind = str(process_group.name()).lower()
        self._on_cuda = "nccl" in self._kind
        # Gloo works in host memory, NCCL on this process's GPU; tensors elsewhere are brought there and back.
        self.device: torch.device = torch.device("cpu")
        if self._on_cuda:
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.launches = CudaLaunches(self, self.device)
        if store is None and hasattr(process_group, "get_group_store"):
            store = under(process_group.get_group_store(), "murmura")
        if roster is None and store is not None:
            roster = sign_in(store, rank, world_size, timeout)
            self.hosts = roster.hosts
        self._store = roster.store if roster else None
        self._liveness = Liveness(roster.pids if roster else {})
        self._failure_log: FailureLog | None = None
        if self._store is not None:
            self._failure_log = FailureLog(self._store, rank, world_size, self._liveness, self.reporter)
        self._group_store: Store | None = None  # torch does not keep alive what it was handed
        self._owns_group = False
        self.streams: Streams | None = None  # of tagged messages, if this is their channel
        self._call = ""  # in words, of the operation under way
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._awaited = self._peers  # whom it waits for

    @classmethod
    def join(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        kind: str = "gloo",
        check: str = "best_effort",
        timeout: float = 600.0,
        hosts: Sequence[int] | None = None,
        name: str = "",
        world_ranks: Sequence[int] | None = None,
        watch: Watch = nobody,
        notes: StallNotes | None = None,
        launches: CudaLaunches | None = None,
        roster: Roster | None = None,
    ) -> Self:
        """Build a process group of one's own on `store`; every rank calls it with the same store.

        With a `SignedStore` it returns when all ranks have proved to each other that they know its secret.
        `hosts` pretends that ranks are on several hosts. `world_ranks` are the ranks in the world that this is a part
        of, if it is one, `watch` tells of those that cannot come any more, `notes` are the world's stall notes, and
        `launches` those of the transport that this is split off. `roster` is given if the ranks have already signed in.
        """
        check_timeout(timeout, ConfigError)
        reporter = Reporter(rank, range(world_size) if world_ranks is None else world_ranks)
        began = Deadline(timeout)
        try:
            roster = roster or sign_in(store, rank, world_size, timeout, reporter, watch)
        except RendezvousError as error:
            if world_ranks is None or not error.missing:
                raise
            missing = [place for place, each in enumerate(world_ranks) if each in error.missing]  # of the world: late
            raise reporter.timed_out(missing, "the rendezvous", began.waited) from error
        group, group_store = build_group(roster, world_size, kind, timeout, reporter, watch)
        transport = cls(group, check=check, timeout=timeout, roster=roster, name=name)
        if transport.launches is not None and launches is not None:
            transport.launches.follow(launches)
        if notes is not None and transport._failure_log is not None:
            transport._failure_log.notes = notes
        transport._owns_group = True
        transport._group_store = group_store
        if hosts is not None:
            transport.hosts = tuple(hosts)
        if isinstance(store, SignedStore):
            try:
                prove_to_each_other(transport, roster.store)
            except BaseException:
                transport.close()
                raise
        return transport

    # Transport's contract

    def do_exchange(self, sends: Pairs, recvs: Pairs, timeout: float | None) -> None:
        outgoing = [(flatten(tensor, self.device), dst) for tensor, dst in sends]
        incoming = [(flatten(out, self.device, load=False), src) for out, src in recvs]
        is_whole = self.operation == "exchange"  # and not part of a collective, which fails for want of any rank
        if is_whole:
            self._call = describe_exchange(sends, recvs)
            self._awaited = sorted({peer for _, peer in (*sends, *recvs)})
        if is_whole and self.check is Check.ALWAYS and not self._on_cuda:
            self._exchange_checked(outgoing, incoming, sends, recvs, self.seconds(timeout))
        else:
            self.move(outgoing, incoming, self.seconds(timeout))
        for (flat, _), (out, _) in zip(incoming, recvs, strict=True):
            bring_back(flat, out)

    def split(self, name: str, ranks: Sequence[int] | None = None) -> ProcessGroupTransport | None:
        return self._split(name, ranks, self._kind)

    def host_channel(self, name: str) -> Transport:
        self.announce()
        channel = self._split(name, None, "gloo" if self._on_cuda else self._kind)
        assert channel is not None  # every rank is a member
        return channel

    def _split(self, name: str, ranks: Sequence[int] | None, kind: str) -> ProcessGroupTransport | None:
        members = self.split_members(ranks)
        if members is None:
            return None
        failure_log = self._failure_log
        if self._store is None or failure_log is None:
            raise UsageError(
                "this process group does not give its store, so no channel can be split off. "
                "Pass it: ProcessGroupTransport(group, store=store), or make the transport with join() or connect()."
            )
        label = f"split/{name}/{'-'.join(map(str, members))}/{self.split_ordinal(name, members)}"
        try:
            with torch.cuda.device(self.device) if self._on_cuda else contextlib.nullcontext():
                split = ProcessGroupTransport.join(
                    under(self._store, label),
                    members.index(self.rank),
                    len(members),
                    kind=kind,
                    check=self.check,
                    **self.split_options(name, members),
                    watch=lambda: failure_log.cause(f"split({name!r})", among=members),
                    notes=failure_log.notes,
                    launches=self.launches,
                )
        except (UsageError, ConfigError):
            raise
        except BaseException as error:  # the members that wait for this rank there hear of it here
            self.abort(error)
            raise
        self.keep_split(split, members)
        return split

    def tagged_messages(self) -> TaggedMessages:
        return ProcessGroupMessages.split_off(self)

    def on_abort(self, error: BaseException) -> None:
        failure_log = self._failure_log  # the watchdog comes here while another thread may close
        if failure_log is not None and not self.closed:
            failure_log.announce_exit(ExitNotice.of(error, self.reporter.own))
        self.end_group_waits()  # ends waits inside torch, and on CUDA kernels that would hold up the device

    def on_close(self) -> None:
        if self.launches is not None:
            self.launches.drain(until_begun=True)  # peers that have begun wait for this rank, and must not hear it left
        if self._failure_log is not None and self.failure is None:
            self._failure_log.announce_exit(self.exit_notice())
        if not self._executor.idle or (self.streams is not None and self.streams.in_flight(sends=False)):
            self.end_group_waits()  # what still waits in the communication thread, or for a message, will wait no more
        if self.launches is not None:
            self.launches.drain()

    def release(self) -> None:
        if self.launches is not None:
            self.launches.close()
        try:
            if self._owns_group:
                shut_down = self._group.shutdown
                if not self._on_cuda:
                    shut_down()
                # After a failure it would wait for ranks that may never come.
                elif self.failure is not None or not own_groups.end_within(self.timeout, self.device, shut_down):
                    self.end_group_waits()
        finally:
            self._group = self._group_store = self._store = self.store_served = self._failure_log = None
            self._liveness.close()

    # Collectives the group has itself

    def all_reduce_flat(
        self, flat_in: Tensor, flat_out: Tensor, op: ReduceOp, call: str, timeout: float | None
    ) -> None:
        if not group_operations.has_all_reduce(self._kind, flat_out, op, self.world_size):
            super().all_reduce_flat(flat_in, flat_out, op, call, timeout)
            return
        self.compare_calls(call, timeout)
        if flat_out is not flat_in:
            flat_out.copy_(flat_in)
        # The sum may exceed the range of float16 where the mean does not.
        total = flat_out.float() if op is ReduceOp.MEAN and flat_out.dtype is torch.float16 else flat_out
        native = group_operations.native_op(op, self.world_size, on_cuda=self._on_cuda)
        self.await_works(lambda limit: self._group.allreduce([total], self._all_reduce_options(native, limit)), timeout)
        if op is ReduceOp.MEAN and native != group_operations.MEAN:
            divide(total, self.world_size)
        if total is not flat_out:
            flat_out.copy_(total)

    def broadcast_flat(self, flat: Tensor, src: int, call: str, timeout: float | None) -> None:
        self.compare_calls(call, timeout)
        options = dist.BroadcastOptions()
        options.rootRank = src
        raw = flat.view(torch.uint8)
        self.await_works(lambda limit: self._group.broadcast([raw], self._limited(options, limit)), timeout)

    def do_barrier(self, timeout: float | None) -> None:
        if self.world_size == 1:
            return
        self.compare_calls("barrier()", timeout)
        options = dist.AllreduceOptions()
        with self.host_waiting():
            token = torch.zeros(1, device=self.device)
            self.await_works(lambda limit: self._group.allreduce([token], self._limited(options, limit)), timeout)

    def compare_calls(self, call: str, timeout: float | None) -> None:
        self._call, self._awaited = call, self._peers
        if self.check is Check.ALWAYS and self.world_size > 1:
            place = (self.rank, self.reporter, self.operation, self.seconds(timeout), self.device)
            with self.host_waiting():
                agreement.on_collective(self.move, call, *place)

    # Waiting and failing

    def run_in_turn(self, name: str, work: Callable[[], Any], async_op: bool = False) -> Any:
        # A wait inside torch cannot be interrupted, so it happens in the communication thread while this one waits for
        # the ticket. CUDA groups only enqueue, and so need neither.
        if async_op or self._on_cuda or self._executor.in_thread():
            return super().run_in_turn(name, work, async_op)
        try:
            return self._watched(name, self.submit(name, work)).wait()
        except KeyboardInterrupt as interrupt:
            self.abort(interrupt)
            self.end_group_waits()
            raise

    def submit_job(self, what: str, work: Callable[[], Any], operation: str = "exchange") -> Ticket:
        ticket = super().submit_job(what, work, operation)
        return ticket if self._on_cuda else self._watched(what, ticket)

    def _watched(self, what: str, ticket: Ticket) -> Ticket:
        """Let the thread that waits for `ticket` warn if that takes long: the one that waits inside torch cannot."""
        begin, peers = partial(WaitDeadline, self.reporter, what), self._peers
        ticket.watch = lambda: partial(begin().check, peers)
        return ticket

    def end_group_waits(self) -> None:
        """End the waits in a group of our own; a group that was handed over may be in use elsewhere."""
        group = self._group
        if not self._owns_group or group is None:
            return
        if self._on_cuda:
            own_groups.abort(group, self.device)
        else:
            group_operations.close_connections(group, self._peers)

    def move(self, sends: Pairs, recvs: Pairs, timeout: float) -> None:
        """Exchange flat tensors as bytes; receives are posted first (on Gloo that is twice as fast)."""
        if not sends and not recvs:
            return
        device = self.device if self._on_cuda else None
        by_size = self._kind == "gloo" and self.operation != "exchange"
        start = partial(group_operations.start, self._group, device, sends, recvs, by_size=by_size)
        self.await_works(lambda limit: start(), timeout)

    def _exchange_checked(self, outgoing: Pairs, incoming: Pairs, sends: Pairs, recvs: Pairs, timeout: float) -> None:
        deadline = Deadline(timeout)
        with self._translated(deadline):
            wait = partial(group_operations.await_work, deadline=deadline)
            agreement.exchange(self._group, wait, outgoing, incoming, sends, recvs, self.reporter)

    def stream(
        self, outgoing: Tensor, dst: int, incoming: Tensor, src: int, *, timeout: float | None = None
    ) -> Iterator[tuple[int, int]]:
        """See `Streaming`. For collectives only: it runs inside the operation under way."""
        if self._on_cuda:  # nothing is gained by parts
            self.move([(outgoing, dst)], [(incoming, src)], self.seconds(timeout))
            yield 0, incoming.numel()
            return
        deadline = Deadline(self.seconds(timeout))
        with self._translated(deadline):
            wait = partial(group_operations.await_work, deadline=deadline)
            yield from group_operations.stream(self._group, wait, outgoing, dst, incoming, src)

    def await_works(self, start: Callable[[timedelta | None], Any], timeout: float | None) -> None:
        """Start works of the group and wait for all of them; translate their errors into ours."""
        deadline = Deadline(self.seconds(timeout))
        if self.launches is not None:
            with self._translated(deadline):
                self.launches.launch(start, self.operation, self._call, self._awaited, deadline.timeout)
            return
        with self._translated(deadline):
            works = start(timedelta(seconds=deadline.timeout))
            for work in works if isinstance(works, list) else [works]:
                group_operations.await_work(work, deadline)

    @contextlib.contextmanager
    def _translated(self, deadline: Deadline) -> Iterator[None]:
        try:
            yield
        except UsageError:  # refused before anything was sent
            raise
        except (RuntimeError, ValueError) as error:
            raise self._translate(error, deadline.waited) from error

    def _translate(self, error: Exception, waited: float) -> Exception:
        operation = self.operation if self.launches is None else self.launches.named(self.operation)
        if self.failure is not None:  # aborted meanwhile, or closed, which is the cause
            return self.reporter.aborted(self.failure, operation, waited)
        if self.closed:
            return self.reporter.closed(operation)
        return self.explain(error, operation or "an operation", waited)

    def known_cause(self, launch: Launch, waited: float) -> BaseException | None:
        failure_log = self._failure_log
        return None if failure_log is None else failure_log.cause(launch.operation, waited)

    def explain_delay(self, launch: Launch, waited: float) -> BaseException:
        late = TimeoutError(f"timed out after {launch.timeout:.1f} s.")
        return self._explain_call(late, launch.operation, launch.call, launch.awaited, waited)

    def explain(self, error: Exception, operation: str, waited: float) -> Exception:
        """Translate an error of the group into one of ours; a group inside another transport leaves that to it."""
        return self._explain_call(error, operation, self._call, self._awaited, waited)

    def _explain_call(
        self, error: Exception, operation: str, call: str, awaited: Sequence[int], waited: float
    ) -> Exception:
        timed_out, failure_log = is_timeout(error), self._failure_log
        if failure_log is None:
            return (PeerTimeout if timed_out else TransportError)(
                f"rank {self.reporter.own}: {operation} failed after {waited:.1f} s: {error} "
                "Which rank is at fault cannot be told, for this process group does not give its store.",
                rank=self.reporter.own,
                operation=operation,
            )
        return failure_log.explain(call, operation, waited, awaited=awaited, timed_out=timed_out, told=error)
