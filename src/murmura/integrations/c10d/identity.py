"""Who a process group is, and how it ends: what torch asks of a group besides collectives."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from murmura.errors import TransportError, UsageError
from murmura.integrations.c10d.closed_transport import ClosedMessages, ClosedTransport
from murmura.integrations.c10d.groups import Channel
from murmura.integrations.c10d.memory_pool import MemoryPool
from murmura.integrations.c10d.operation_queue import DRAIN_SECONDS, OperationQueue, end_with_program
from murmura.integrations.c10d.repeated_all_reduces import RepeatedAllReduces
from murmura.integrations.c10d.work import QueuedWork, seconds_of
from murmura.transports.base import Transport
from murmura.transports.listeners import CollectiveListeners
from murmura.transports.tagged_messages import TaggedMessages


class GroupOptions:
    """The options of a group as torch asks for them; its own class has no constructor for other backends."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self.backend = "murmura"
        self.global_ranks_in_group: Any = ()
        self.group_name: Any = ""


_ProcessGroup: Any = dist.ProcessGroup  # whose declared types are those of C++, with overloads that torch never calls


class GroupIdentity(_ProcessGroup):  # type: ignore[misc]
    """The name, the place and the life of a group.

    torch gives a backend written in Python no base class but `ProcessGroup` itself, whose own answers come from
    backends registered in C++; so this answers everything, and says that it is its own backend.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, channel: Channel, store: Any, timeout: timedelta, others: Any = None) -> None:
        super().__init__(channel.transport.rank, channel.transport.world_size)
        self._channel: Channel | None = channel  # None once it was left
        self._transport: Transport = channel.transport
        self._messages: TaggedMessages = channel.messages
        self._store = store
        self._others = others  # a group of torch's for the tensors of other devices, or None
        self._name, self._desc = "", ""
        transport = channel.transport
        self._queue = OperationQueue(f"c10d-{transport.name}", transport.reporter.own, transport.absent_peers)
        weakref.finalize(self._queue, end_with_program, weakref.ref(self._queue), weakref.ref(transport))
        self._pool = MemoryPool(channel.transport)
        self._repeated = RepeatedAllReduces(channel.transport)
        self._num_barriers = 0
        self._listeners = CollectiveListeners()
        self.options = GroupOptions(timeout)

    def before_collectives(self, listener: Callable[[], None]) -> None:
        """Call `listener`, a bound method, before each collective: as `Transport.before_collectives`."""
        self._listeners.add(listener)

    # Place and names

    def rank(self) -> int:
        return self._transport.rank

    def size(self) -> int:
        return self._transport.world_size

    def name(self) -> str:
        return "murmura"

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "murmura"

    def _get_backend_name(self) -> str:
        return "murmura"

    def get_group_store(self) -> Any:
        return self._store

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: Any) -> None:
        self._name = name
        if self._others is not None:
            self._others._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc
        if self._others is not None:
            self._others._set_group_desc(desc)

    def getGroupName(self) -> str:  # noqa: N802
        return str(self._name)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._set_group_name(name)

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._set_group_desc(desc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([] if self._others is None else self._others._device_types)]

    def _get_backend(self, device: torch.device | str) -> Any:
        device = torch.device(device)
        return self if device.type == "cpu" else self._elsewhere(device)._get_backend(device)

    def _elsewhere(self, device: torch.device) -> Any:
        """The group for tensors on `device`, which is not the CPU."""
        if self._others is None or all(each.type != device.type for each in self._others._device_types):
            raise UsageError(
                f"rank {self._transport.reporter.own}: this process group is for CPU tensors, and the tensor is on "
                f"{device}. Copy it with .cpu(), or, for CUDA tensors, make the group with "
                'init_process_group("cpu:murmura,cuda:nccl").'
            )
        return self._others

    def _backend_id(self, backend_type: Any) -> int:
        return id(self)

    def _set_sequence_number_for_group(self) -> None:
        return

    def _get_sequence_number_for_group(self) -> int:
        return self._transport.num_collectives

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        return

    def _verify_work_timeout(self, work: Any, timeout: timedelta) -> bool:
        return True

    # Memory

    def supports_tensor_alloc(self, device: torch.device | str = "cpu") -> bool:
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """Memory in which collectives need no copy; what is in it is left from before."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise UsageError(f"size={size!r} must be a whole number of elements, at least 0.")
        return self._pool.take(size, dtype)

    # Deadlines and the end

    def set_timeout(self, timeout: timedelta) -> None:
        seconds = seconds_of(timeout)
        if seconds is None:
            raise UsageError(f"timeout={timeout} is not a time above 0: without a deadline a rank would wait for ever.")
        self.options._timeout = timeout
        if self._channel is not None:
            self._channel.set_timeout(seconds)
        for device in () if self._others is None else self._others._device_types:
            self._others._get_backend(device)._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End the operations under way here, and tell the peers that this rank has given up."""
        if self._channel is None or self._transport.forked:  # left already, or the parent's
            return
        own = self._transport.reporter.own
        error = TransportError(f"rank {own} aborted the process group {self._name or self._transport.name}.", rank=own)
        self._channel.abort(error)
        if self._others is not None:
            self._others.abort()
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group; may be called again. What is queued has a moment to end: its peers may need it."""
        if self._channel is None or self._transport.forked:
            return
        if not self._queue.drain(DRAIN_SECONDS):
            self._transport.abort(self._transport.reporter.closed("an operation that nobody waited for"))
        self._queue.close()
        self._channel.close()
        self._pool.close()
        self._let_go()
        if self._others is not None:
            with contextlib.suppress(RuntimeError):  # torch 2.6 has it on backends only
                self._others.shutdown()

    def _let_go(self) -> None:
        """Keep nothing of the transport, which is closed: torch keeps groups that were destroyed, in caches for example
        and in arguments of its functions, and they would keep its memory and its connections."""
        self._channel = None
        self._transport = left = ClosedTransport(self._transport)
        self._messages = ClosedMessages(left)
        self._pool, self._repeated = MemoryPool(left), RepeatedAllReduces(left)

    # Coalescing: torch collects the operations itself and calls a `_coalesced` form

    def _start_coalescing(self, device: torch.device | str | None = None) -> None:
        if device is not None and torch.device(device).type != "cpu":
            self._elsewhere(torch.device(device))._start_coalescing(torch.device(device))

    def _end_coalescing(self, device: torch.device | str | None = None) -> Any:
        if device is not None and torch.device(device).type != "cpu":
            return self._elsewhere(torch.device(device))._end_coalescing(torch.device(device))
        everything = QueuedWork(self._queue, lambda limit: None, ())  # ends after all that was called before
        return self._queue.submit(everything)
