"""Endpoint: one rank's end of a channel, before it has operations: its place in the world and its life.

It runs operations one at a time (`run_operation`), fails once (`abort`), closes once (`close`), and passes all that on
to the channels split off it (`keep_split`). `Transport` inherits it and adds the operations.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from murmura.errors import ConfigError, TransportClosed, UsageError
from murmura.observe.probe import Probe
from murmura.transports import profiling
from murmura.transports.checks import check_members, check_timeout
from murmura.transports.error_reporter import ExitNotice, Reporter
from murmura.transports.forks import forked_from, guard
from murmura.transports.listeners import CollectiveListeners
from murmura.transports.profiling import is_profiled
from murmura.transports.program_end import END_SECONDS, LINGER_SECONDS, has_raised, reason_of_end
from murmura.transports.serial_executor import SerialExecutor, Ticket


class Endpoint:
    """See the module; the attributes are listed at `Transport`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        hosts: Sequence[int] | None = None,
        timeout: float = 600.0,
        name: str = "",
        world_ranks: Sequence[int] | None = None,
    ) -> None:
        """`world_ranks[r]` is what rank r is called in the world, if this is a channel or a subgroup of it."""
        check_timeout(timeout, ConfigError)
        self.rank = rank
        self.world_size = world_size
        self.hosts: Sequence[int] = tuple(hosts) if hosts is not None else (0,) * world_size
        self.timeout = timeout
        self.name = name or "world"
        self.world_ranks: Sequence[int] = tuple(range(world_size) if world_ranks is None else world_ranks)
        self.reporter = Reporter(rank, self.world_ranks)
        self.failure: BaseException | None = None
        self._failing = threading.Lock()  # held while `failure` is set
        self.closed = False
        self.operation = ""
        self.default_algorithm: str | None = None
        self._executor = SerialExecutor(f"{self.name}-rank{rank}")
        weakref.finalize(self, _end_thread, weakref.ref(self), self._executor)  # dropped, or open when the program ends
        self.num_collectives = 0  # called so far
        self._split_counts: dict[tuple[str, Sequence[int]], int] = {}
        self._splits: weakref.WeakSet[Any] = weakref.WeakSet()  # kept alive by whoever uses them
        self._wrappers: weakref.WeakSet[Any] = weakref.WeakSet()  # transports around this one
        self._parent: Endpoint | None = None  # that this was split off
        self._failures: list[BaseException] = []  # of this endpoint and all that was split off
        self._ranks_in_parent: Sequence[int] = range(world_size)  # by rank here, if this was split off
        self._probe: Probe | None = None
        self._listeners = CollectiveListeners()  # shared with what is split off
        self.store_served: Any = None  # by this rank, kept alive as long as this endpoint
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.forked = False  # whether this process is a child of the rank's own
        guard(self)

    @property
    def local_rank(self) -> int:
        """The number of this rank among those of its host, from 0."""
        return list(self.hosts[: self.rank]).count(self.hosts[self.rank])

    # Closing and failing

    def close(self) -> None:
        """Leave the world; peers that still wait for this rank get `PeerLost`. May be called again."""
        if self.closed:
            return
        self.closed = True
        with contextlib.ExitStack() as steps:  # from the last to the first, each of them whatever another raises
            steps.callback(self._release)
            steps.callback(self._executor.close)
            steps.callback(self.on_close)
            for split in list(self._splits):
                steps.callback(split.close)

    def _release(self) -> None:
        if not self._executor.is_running:  # its thread, if an interrupt has ended the wait for it, needs what is held
            self.release()

    def abort(self, error: BaseException) -> None:
        """Poison the transport because of `error`, so that peers learn the cause before `close` ends it."""
        if not self.fail(error):
            return
        self.on_abort(error)
        for split in list(self._splits):
            split.abort(error)

    def fail(self, error: BaseException) -> bool:
        """Refuse operations from now on, here and in transports around this one; False if this has failed before.

        Nothing is broken off yet: what `on_abort` breaks off on a GPU looks as if it had ended, and whoever reads its
        result must know better by then.
        """
        if self.forked:  # where it has failed, and nobody may ever release the lock
            return False
        with self._failing:  # threads may fail at once
            is_first = self.failure is None
            self.failure = error if self.failure is None else self.failure
        if not is_first:
            return False
        self._failures.append(error)
        for wrapper in list(self._wrappers):
            wrapper.fail(error)
        return True

    def end_with_program(self) -> None:
        """The program ends and this was not closed: end the waits of its communication thread, and the thread.

        If it ends well, what is under way has a moment to end by itself: peers may need it.
        """
        if not has_raised():
            self._executor.end(LINGER_SECONDS)
        if not self._executor.idle:
            top = self
            while top._parent is not None:
                top = top._parent
            operation = self.operation or "an operation that nobody waited for"
            top.abort(reason_of_end(self.reporter, operation))
        self._executor.end(END_SECONDS)

    def after_fork(self) -> None:
        """In a forked child: operations are refused from now on, and to close or abort this does nothing."""
        self.failure = error = forked_from(self.reporter.own)
        self.forked = self.closed = True
        inherited, self._executor = self._executor, SerialExecutor(f"{self.name}-rank{self.rank}")
        inherited.fail_all(error)  # its thread is not here

    def on_close(self) -> None:
        """End the waits under way in this rank, and tell the peers that it leaves (`exit_notice`)."""
        return

    def on_abort(self, error: BaseException) -> None:
        """End the waits under way in this rank, and tell the peers why it fails."""
        return

    def release(self) -> None:
        """Free what this rank holds; no operation runs any more."""
        return

    def exit_notice(self) -> ExitNotice:
        """What to tell the peers when this rank closes: the first failure, also of a channel, or that it left."""
        own = self.reporter.own
        return ExitNotice.of(self._failures[0], own) if self._failures else ExitNotice(own)

    @property
    def failed(self) -> bool:
        """Whether an operation has failed, so that the transport is of no use any more."""
        return self.failure is not None

    @property
    def fails_later(self) -> bool:
        """Whether an operation may fail after it has returned, as on a GPU, when its result may be in use already."""
        return False

    def first_failed(self) -> Endpoint | None:
        """This endpoint if it has failed, or one split off it that failed after its results were in use."""
        if self.failed:
            return self
        for split in list(self._splits):
            failed: Endpoint | None = split.first_failed()
            if failed is not None and failed.fails_later:  # others have told whoever waited for the result
                return failed
        return None

    def check_usable(self, operation: str = "") -> None:
        """Raise if this transport has failed or was closed."""
        if self.forked:
            raise forked_from(self.reporter.own)
        if self.failure is not None:
            raise self.reporter.again(self.failure, operation) from self.failure
        if self.closed:
            rank = self.reporter.own
            raise TransportClosed(
                f"rank {rank} closed this transport ({self.name}) before the call. Make a new one with connect().",
                rank=rank,
                operation=operation or None,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        self.close()

    # Channels and observers

    def split_members(self, ranks: Sequence[int] | None) -> tuple[int, ...] | None:
        """The ranks of a split, None meaning all, once they are checked; None if this rank is none of them."""
        members = tuple(range(self.world_size)) if ranks is None else check_members(ranks, self.world_size)
        self.check_usable()
        return members if self.rank in members else None

    def split_ordinal(self, name: str, members: Sequence[int]) -> int:
        """Count the splits of this name: the k-th is one channel on all members, whatever else they split."""
        ordinal = self._split_counts[name, members] = self._split_counts.get((name, members), 0) + 1
        return ordinal

    def split_options(self, name: str, members: Sequence[int]) -> dict[str, Any]:
        """What the constructor of a split of `members` is given: hosts, timeout, name and world_ranks."""
        return {
            "hosts": [self.hosts[member] for member in members],
            "timeout": self.timeout,
            "name": f"{self.name}/{name}",
            "world_ranks": [self.world_ranks[member] for member in members],
        }

    def keep_split(self, split: Endpoint, members: Sequence[int] | None) -> None:
        """Close, abort and observe `split` together with this; `members` are its ranks here, None for all."""
        self._splits.add(split)
        split._parent = self  # so that a channel that was dropped still hands on what ends this one
        split._failures = self._failures
        split.default_algorithm = self.default_algorithm
        if split.world_size == self.world_size:
            split._listeners = self._listeners
        if members is not None:
            split._ranks_in_parent = members
        if self._probe is not None:
            split.observe(self._probe.within(split._ranks_in_parent))

    def observe(self, probe: Probe | None) -> None:
        """Report operations and waiting to `probe`, here and on what is split off now or later; None ends it."""
        self._probe = probe
        self.observe_waiting(probe)
        for split in list(self._splits):
            split.observe(None if probe is None else probe.within(split._ranks_in_parent))

    def observe_waiting(self, probe: Probe | None) -> None:
        """Report to `probe` which peers operations wait for; a transport that cannot tell does nothing."""
        return

    def before_collectives(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, a bound method, before each collective, also on channels; returns what removes it.

        It runs in the thread that calls the collective, and may itself communicate on another channel. The method is
        held weakly.
        """
        return self._listeners.add(listener)

    def announce(self) -> None:
        """Tell the listeners that a collective is about to begin, unless it is part of another operation."""
        if self._listeners.members and not self._executor.runs_here():
            self._listeners.notify()

    def without_listeners(self) -> Self:
        """The same transport, on which operations are no longer announced: for listeners to communicate on."""
        self._listeners = CollectiveListeners()
        for split in self._splits:
            split.without_listeners()
        return self

    # Operations

    def run_operation(
        self,
        name: str,
        work: Callable[[], Any],
        async_op: bool,
        sent: Sequence[Tensor] = (),
        received: Sequence[Tensor] = (),
    ) -> Any:
        """Run `work` as operation `name` in its turn; return its result, or a `Ticket` if `async_op`.

        `sent` and `received` are the tensors that it reads and, as far as they are known before, writes. Listeners and
        observers are told of it, unless it is part of another operation.
        """
        if name != "exchange":
            self.announce()
        probe = self._probe
        if probe is not None and not self._executor.runs_here():
            work = probe.operation(name, sent, work, in_background=async_op)
        if not is_profiled() or self._executor.runs_here():
            return self.run_in_turn(name, work, async_op)
        if async_op:
            return self.run_in_turn(name, profiling.until_done(name, work), async_op)
        with profiling.event(name):
            return self.run_in_turn(name, work)

    def run_in_turn(self, name: str, work: Callable[[], Any], async_op: bool = False) -> Any:
        """Run `work` after all that was called before: here, or in the communication thread if `async_op`."""
        if async_op:
            return self.submit(name, work)
        return self._executor.run(lambda: self._perform(name, work))

    def submit(self, name: str, work: Callable[[], Any]) -> Ticket:
        """Queue an operation for the communication thread; it runs in the caller's CUDA stream and inference mode."""
        inference = torch.is_inference_mode_enabled()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

        def perform() -> Any:
            # torch.cuda.stream(None) would initialise CUDA, in a process that may use none.
            current = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
            with torch.inference_mode(inference), current:
                return self._executor.run(lambda: self._perform(name, work))

        return self._executor.submit(f"{name} on rank {self.reporter.own}", perform)

    def submit_job(self, what: str, work: Callable[[], Any], operation: str = "exchange") -> Ticket:
        """Queue `work` for the communication thread; operations that it calls run there at once, as if called alone.

        A profiler sees it as one event, named after `operation`.
        """
        return self._executor.submit(what, profiling.until_done(operation, work) if is_profiled() else work)

    def run_job(self, what: str, work: Callable[[], Any]) -> Ticket:
        """Do `work` here and now; the ticket, which has ended, holds its error."""
        return self._executor.run_job(what, work)

    def has_spare_core(self) -> bool:
        """Whether operations in the background take no core from whoever computes: because they only wait, or because
        there is one for them."""
        return True

    def _perform(self, name: str, work: Callable[[], Any]) -> Any:
        outermost = not self.operation
        number = self.num_collectives + (name != "exchange")
        operation = name if name == "exchange" else f"{name} #{number}"
        self.check_usable(operation)
        if outermost:
            self.num_collectives, self.operation = number, operation
        try:
            return work()
        except (UsageError, ConfigError):  # refused before anything was sent
            raise
        except BaseException as error:  # whatever it was, this rank is now out of step with the others
            self.abort(error)
            raise
        finally:
            if outermost:
                self.operation = ""

    def trains_here(self) -> None:
        """The calling thread trains on this endpoint, or on one split off it."""
        return

    def communication_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of `device` on which exchanges run beside training."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def await_current_stream(self) -> None:
        """Where operations return before they are done, let the host wait until the current stream has done all so far.

        Raises if the transport fails meanwhile. There is no deadline: operations have theirs, other kernels have none.
        """
        return

    def seconds(self, timeout: float | None) -> float:
        """The deadline of a call in seconds: its own `timeout`, or the transport's."""
        return self.timeout if timeout is None else timeout


def _end_thread(reference: weakref.ref[Endpoint], executor: SerialExecutor) -> None:
    endpoint = reference()
    if endpoint is None:
        executor.dismiss()  # to wait for it might take a deadline
    else:
        endpoint.end_with_program()
