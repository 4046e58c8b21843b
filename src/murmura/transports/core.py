"""The machinery under every transport: one order of operations, one failure, one deadline.

`Transport` inherits it and adds the operations themselves.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from murmura.errors import ConfigError, TransportClosed, UsageError
from murmura.observe.probe import Probe
from murmura.transports.checks import check_timeout
from murmura.transports.failures import Departure, Reporter
from murmura.transports.listeners import CollectiveListeners
from murmura.transports.order import Order, Ticket


class TransportCore(ABC):
    """What a rank's end of a world is, before it can exchange anything."""

    _works_on: torch.device | None = None
    """The device whose memory the backend works in; tensors of other kinds are brought there. None: any."""

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
        """`world_ranks[r]` is what rank r is called in the world, if this is a channel, a subgroup or a part of it."""
        check_timeout(timeout, ConfigError)
        self.rank = rank
        self.world_size = world_size
        self.hosts: Sequence[int] = tuple(hosts) if hosts is not None else (0,) * world_size
        self.timeout = timeout
        self.name = name or "world"
        self.world_ranks: Sequence[int] = tuple(range(world_size) if world_ranks is None else world_ranks)
        self._reporter = Reporter(rank, self.world_ranks)
        self._order = Order(f"{self.name}-rank{rank}")
        self._order.close_with(self)  # if it is dropped without being closed
        self._failure: BaseException | None = None
        self._closed = False
        self._operation = ""  # what runs now, for error messages
        self._num_collectives = 0
        self._splits: weakref.WeakSet[Any] = weakref.WeakSet()  # transports of the backend's own kind, as long as used
        self._failures: list[BaseException] = []  # of this transport and all that was split off
        self._ranks_in_parent: Sequence[int] = range(world_size)  # by rank here, if this was split off
        self._probe: Probe | None = None
        self._listeners = CollectiveListeners()  # shared with what is split off
        self._store_served: Any = None  # that lives as long as this, if this rank serves it

    @abstractmethod
    def close(self) -> None:
        """Leave the world; peers that still wait for this rank get `PeerLost`. May be called again."""

    def abort(self, error: BaseException) -> None:
        """Poison the transport because of `error`, so that peers learn the cause before `close` ends it."""
        if self._failure is None:
            self._failure = error
            self._failures.append(error)

    def _parting(self) -> Departure:
        """What to tell the peers when this rank closes: the failure of a channel, if one failed, outlives it."""
        own = self._reporter.own
        return Departure.of(self._failures[0], own) if self._failures else Departure(own)

    @property
    def failed(self) -> bool:
        """Whether an operation has failed, so that the transport is of no use any more."""
        return self._failure is not None

    def before_collectives(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, a bound method, before each collective, also on channels; returns what removes it.

        It runs in the thread that calls the collective, and may itself communicate on another channel. The method is
        held weakly.
        """
        return self._listeners.add(listener)

    def announce(self) -> None:
        """Tell the listeners that a collective is about to begin, unless it is part of another operation."""
        if self._listeners.members and not self._order.runs_here():
            self._listeners.notify()

    def without_listeners(self) -> Self:
        """The same transport, on which operations are no longer announced: for whoever listens, to communicate on."""
        self._listeners = CollectiveListeners()
        for split in self._splits:
            split.without_listeners()
        return self

    def observe(self, probe: Probe | None) -> None:
        """Report operations and waiting to `probe`, here and on what is split off now or later; None ends it."""
        self._probe = probe
        self._observe_waiting(probe)
        for split in list(self._splits):
            split.observe(None if probe is None else probe.within(split._ranks_in_parent))

    def _observe_waiting(self, probe: Probe | None) -> None:
        """Report whom operations wait for; here, where a backend cannot tell, do not."""
        return

    def _keep(self, split: TransportCore, members: Sequence[int] | None) -> None:
        """`split`, of ranks `members`, has been split off: it is closed and observed together with this transport."""
        self._splits.add(split)
        split._failures = self._failures
        if split.world_size == self.world_size:
            split._listeners = self._listeners
        if members is not None:
            split._ranks_in_parent = members
        if self._probe is not None:
            split.observe(self._probe.within(split._ranks_in_parent))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        self.close()

    def _operate(self, name: str, work: Callable[[], Any], async_op: bool, sent: Sequence[Tensor] = ()) -> Any:
        """Run one operation, which is given `sent`, as `_run` does; it is reported unless it is part of another."""
        if name != "exchange":
            self.announce()
        probe = self._probe
        if probe is not None and not self._order.runs_here():
            work = probe.operation(name, sent, work, in_background=async_op)
        return self._run(name, work, async_op)

    def _sent(self, sends: Sequence[tuple[Tensor, int]]) -> Sequence[Tensor]:
        """What an exchange sends, if anybody wants to know."""
        return () if self._probe is None else [tensor for tensor, _ in sends]

    def _run(self, name: str, work: Callable[[], Any], async_op: bool) -> Any:
        """Run one operation in its turn: inline, or in the communication thread if `async_op`."""
        if async_op:
            return self._submit(name, work)
        return self._order.run(lambda: self._turn(name, work))

    def _submit(self, name: str, work: Callable[[], Any]) -> Ticket:
        """Queue one operation for the communication thread, which works as the caller would: its stream, its mode."""
        inference = torch.is_inference_mode_enabled()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

        def turn() -> Any:
            with torch.inference_mode(inference), torch.cuda.stream(stream):
                return self._turn(name, work)

        return self._order.submit(f"{name} on rank {self.rank}", turn)

    def _turn(self, name: str, work: Callable[[], Any]) -> Any:
        outermost = not self._operation
        number = self._num_collectives + (name != "exchange")
        operation = name if name == "exchange" else f"{name} #{number}"
        self._check_usable(operation)
        if outermost:
            self._num_collectives, self._operation = number, operation
        try:
            return work()
        except (UsageError, ConfigError):  # refused before anything was sent
            raise
        except BaseException as error:  # whatever it was, this rank is now out of step with the others
            self.abort(error)
            raise
        finally:
            if outermost:
                self._operation = ""

    def _check_usable(self, operation: str = "") -> None:
        if self._failure is not None:
            raise self._reporter.again(self._failure, operation) from self._failure
        if self._closed:
            rank = self._reporter.own
            raise TransportClosed(
                f"rank {rank} closed this transport ({self.name}) before the call. Make a new one with connect().",
                rank=rank,
                operation=operation or None,
            )

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    def _flat(self, tensor: Tensor, *, load: bool) -> Tensor:
        """A contiguous one-dimensional tensor of `tensor`'s elements where the backend can work: a view if possible.

        Holds the values of `tensor` if `load`; `store` brings them back.
        """
        tensor = tensor.detach()
        device = tensor.device
        if self._works_on is not None and device.type != self._works_on.type:
            device = self._works_on
        if device != tensor.device or not tensor.is_contiguous():
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=device)
            if load:
                flat.view(tensor.shape).copy_(tensor)
            return flat
        return tensor.resolve_conj().resolve_neg().view(-1)
