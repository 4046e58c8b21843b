"""The contract of a transport: how a tensor gets from rank to rank.

The author of a transport writes `do_exchange` and `split`; every collective is inherited, as a ring or a tree over
`exchange`. A transport that can do better overrides `all_reduce_flat`, `broadcast_flat`, `all_gather_flat`,
`reduce_scatter_flat` or `do_barrier`; one that holds resources overrides `on_close`, `on_abort` and `release`. What
holds for all:

- Operations of one channel run in the order they were called, one at a time, and every rank calls the same
  collectives in the same order. What must not wait for the rest goes on a channel of its own (`split`).
- A call returns when its tensors may be used again; with ``async_op=True`` it returns a `Ticket` at once, and the
  tensors belong to the transport until ``wait``. Nothing is recorded by autograd.
- Every wait ends at a deadline: ``timeout`` seconds, by default those the transport was made with.
- After a `TransportError` or `CollectiveMismatch` the tensors' contents are undefined and the transport is
  poisoned: later calls raise at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from murmura.errors import ConfigError, TransportError, UsageError
from murmura.transports import checks
from murmura.transports.checks import Pairs, Tensors
from murmura.transports.operations import Operations
from murmura.transports.serial_executor import Ticket
from murmura.transports.tagged_messages import TaggedMessages
from murmura.types import ReduceOp

__all__ = ["Pairs", "Transport", "check_transport"]

Op: TypeAlias = ReduceOp | str
Seconds: TypeAlias = float | None
Async: TypeAlias = Literal[True]
Sync: TypeAlias = Literal[False]


class Transport(Operations, ABC):
    """A rank's end of a world of ranks that exchange tensors.

    Attributes:
        rank: this rank, from 0.
        world_size: the number of ranks.
        hosts: hosts[r] is the index of the host of rank r.
        timeout: seconds any wait may last unless a call says otherwise.
        device: the device whose memory the transport works in; tensors of other kinds are copied there and back. None
            means any.
        default_algorithm: the name of what DDP runs on it unless it is told; None leaves that to the environment.
        operation: the operation that runs now, as errors name it: "all_reduce #3"; empty between operations.
        failure: the error that has poisoned the transport, if one has.
        closed: whether this rank has closed it.
        reporter: makes the errors of this rank, in ranks of the world.
    """

    @property
    def gpu(self) -> torch.device | None:
        """The GPU whose memory the transport works in, and which carries out its operations; None if it is no GPU's."""
        return self.device if self.device is not None and self.device.type == "cuda" else None

    # What the author of a transport writes

    @abstractmethod
    def split(self, name: str, ranks: Sequence[int] | None = None) -> Transport | None:
        """A transport with an order of its own: the same ranks (a channel), or fewer (a subgroup), or both.

        Called by every member; `ranks` are numbered anew in the order given. None for a rank that is not a member. An
        implementation hands what it returns to `keep_split`.
        """

    # Messages

    @overload
    def exchange(self, sends: Pairs, recvs: Pairs, *, async_op: Sync = ..., timeout: Seconds = ...) -> None: ...
    @overload
    def exchange(self, sends: Pairs, recvs: Pairs, *, async_op: Async, timeout: Seconds = ...) -> Ticket: ...
    def exchange(self, sends: Pairs, recvs: Pairs, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Send each tensor of `sends` to its rank and fill each of `recvs` from its rank, all at once.

        Messages from one rank to another are matched in the order they were sent. A send is over when it has been
        received, so two ranks that both send before they receive must do so in one exchange.
        """
        checks.check_exchange(sends, recvs, timeout, self.rank, self.world_size)
        sent, received = [tensor for tensor, _ in sends], [out for out, _ in recvs]
        return self.run_operation("exchange", lambda: self.do_exchange(sends, recvs, timeout), async_op, sent, received)

    def send(self, tensor: Tensor, dst: int, *, timeout: float | None = None) -> None:
        """Send `tensor` to rank `dst`; returns when it has been received."""
        self.exchange([(tensor, dst)], [], timeout=timeout)

    def recv(self, out: Tensor, src: int, *, timeout: float | None = None) -> Tensor:
        """Fill `out` from rank `src` and return it; dtype and shape must be those sent."""
        self.exchange([], [(out, src)], timeout=timeout)
        return out

    def isend(self, tensor: Tensor, dst: int, *, timeout: float | None = None) -> Ticket:
        """As `send`, in the channel's communication thread; the tensor is borrowed until ``wait``."""
        return self.exchange([(tensor, dst)], [], async_op=True, timeout=timeout)

    def irecv(self, out: Tensor, src: int, *, timeout: float | None = None) -> Ticket:
        """As `recv`, in the channel's communication thread."""
        return self.exchange([], [(out, src)], async_op=True, timeout=timeout)

    def channel(self, name: str) -> Transport:
        """The same ranks with an order of their own, so that what runs on it waits for nothing here.

        On a GPU all channels have one order on the device, in which every rank must use them; see `host_channel`.
        """
        checks.check_name(name)
        self.announce()
        channel = self.split(name)
        assert channel is not None  # every rank is a member
        return channel

    def host_channel(self, name: str) -> Transport:
        """A channel for a thread beside training, which uses it when its time comes: in no order with other channels.

        Kernels of several communicators that start in other orders on other ranks may wait for each other forever, so
        it works in host memory where this transport works on a GPU.
        """
        return self.channel(name)

    def subgroup(self, ranks: Sequence[int]) -> Transport | None:
        """The transport of `ranks` only; None on the other ranks."""
        members = checks.check_members(ranks, self.world_size)
        return self.split("subgroup-" + "-".join(map(str, members)), members)

    def tagged_messages(self) -> TaggedMessages:
        """Point-to-point messages with tags, from any source, outside the order of this channel; collective."""
        raise UsageError(f"{type(self).__name__} has no tagged messages. Use exchange, or a channel for each tag.")

    # Collectives

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
        """Reduce `tensor` over all ranks, in place or into `out`; every rank gets the same bits.

        Returns the tensor written, or a `Ticket` whose ``wait`` returns it.
        """
        op = checks.check_all_reduce(tensor, op, out, timeout)
        received = [tensor if out is None else out]
        return self.run_operation(
            "all_reduce", lambda: self.do_all_reduce(tensor, op, out, timeout), async_op, [tensor], received
        )

    def prepared_all_reduce(self, tensor: Tensor, op: ReduceOp) -> Any:
        """What `run_prepared` needs to repeat an all-reduce of `tensor` that has ended; None if it cannot.

        It holds no reference to the tensor: use it only for one at the same address, with the same elements.
        """
        return None

    def prepared_elsewhere(self, prepared: Any, address: int) -> Any:
        """What `run_prepared` needs for another tensor, at `address`, of as many elements and the same dtype."""
        return None

    def run_prepared(self, prepared: Any, timeout: float | None) -> bool:
        """Repeat an all-reduce in place, synchronously; False if nothing was done, because it must take its turn."""
        return False

    def absent_peers(self) -> list[int]:
        """The ranks that have not come to the collective under way, as far as it can be told without asking them.

        For messages of errors, from any thread; ranks are those of the world.
        """
        return []

    @overload
    def broadcast(self, tensor: Tensor, src: int = ..., *, async_op: Sync = ..., timeout: Seconds = ...) -> Tensor: ...
    @overload
    def broadcast(self, tensor: Tensor, src: int = ..., *, async_op: Async, timeout: Seconds = ...) -> Ticket: ...
    def broadcast(self, tensor: Tensor, src: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Overwrite `tensor` on every rank with rank `src`'s; returns it, or a `Ticket`."""
        checks.check_broadcast(tensor, src, timeout, self.world_size)
        sent, received = ([tensor], []) if self.rank == src else ([], [tensor])
        return self.run_operation(
            "broadcast", lambda: self.do_broadcast(tensor, src, timeout), async_op, sent, received
        )

    def barrier(self, timeout: float | None = None) -> None:
        """Return once every rank has called."""
        checks.check_timeout(timeout)
        self.run_operation("barrier", lambda: self.do_barrier(timeout), async_op=False)

    @overload
    def reduce(
        self, tensor: Tensor, dst: int = ..., op: Op = ..., *, async_op: Sync = ..., timeout: Seconds = ...
    ) -> Tensor: ...
    @overload
    def reduce(
        self, tensor: Tensor, dst: int = ..., op: Op = ..., *, async_op: Async, timeout: Seconds = ...
    ) -> Ticket: ...
    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduce `tensor` over all ranks, in rank order, into rank `dst`'s; on the others it stays as it is."""
        op = checks.check_reduce(tensor, dst, op, timeout, self.world_size)
        sent, received = ([], [tensor]) if self.rank == dst else ([tensor], [])
        return self.run_operation("reduce", lambda: self.do_reduce(tensor, dst, op, timeout), async_op, sent, received)

    @overload
    def reduce_scatter(
        self, tensor: Tensor, op: Op = ..., *, async_op: Sync = ..., timeout: Seconds = ...
    ) -> Tensor: ...
    @overload
    def reduce_scatter(self, tensor: Tensor, op: Op = ..., *, async_op: Async, timeout: Seconds = ...) -> Ticket: ...
    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduce over all ranks, in rank order, and return this rank's chunk: one-dimensional, and new.

        Chunk i of D elements over n ranks has D // n + (i < D % n) elements.
        """
        op = checks.check_reduce_scatter(tensor, op, timeout)
        return self.run_operation(
            "reduce_scatter", lambda: self.do_reduce_scatter(tensor, op, timeout), async_op, [tensor]
        )

    @overload
    def all_gather(self, tensor: Tensor, *, async_op: Sync = ..., timeout: Seconds = ...) -> list[Tensor]: ...
    @overload
    def all_gather(self, tensor: Tensor, *, async_op: Async, timeout: Seconds = ...) -> Ticket: ...
    def all_gather(self, tensor: Tensor, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Every rank's tensor, in rank order, as new tensors; first dimensions may differ."""
        checks.check_gather(tensor, 0, timeout, self.world_size)
        return self.run_operation("all_gather", lambda: self.do_all_gather(tensor, timeout), async_op, [tensor])

    @overload
    def gather(
        self, tensor: Tensor, dst: int = ..., *, async_op: Sync = ..., timeout: Seconds = ...
    ) -> list[Tensor] | None: ...
    @overload
    def gather(self, tensor: Tensor, dst: int = ..., *, async_op: Async, timeout: Seconds = ...) -> Ticket: ...
    def gather(self, tensor: Tensor, dst: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Every rank's tensor, in rank order, on rank `dst`; None elsewhere. First dimensions may differ."""
        checks.check_gather(tensor, dst, timeout, self.world_size)
        return self.run_operation("gather", lambda: self.do_gather(tensor, dst, timeout), async_op, [tensor])

    @overload
    def scatter(
        self,
        tensors: Sequence[Tensor] | None,
        src: int = ...,
        *,
        out: Tensor,
        async_op: Sync = ...,
        timeout: Seconds = ...,
    ) -> Tensor: ...
    @overload
    def scatter(
        self, tensors: Tensors | None, src: int = ..., *, out: Tensor, async_op: Async, timeout: Seconds = ...
    ) -> Ticket: ...
    def scatter(
        self,
        tensors: Sequence[Tensor] | None,
        src: int = 0,
        *,
        out: Tensor,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Fill `out` with this rank's entry of rank `src`'s `tensors`, which only rank `src` gives."""
        checks.check_scatter(tensors, src, out, timeout, self.rank, self.world_size)
        sent: Tensors = () if tensors is None or self.rank != src else tensors
        return self.run_operation("scatter", lambda: self.do_scatter(tensors, src, out, timeout), async_op, sent, [out])

    @overload
    def all_to_all(self, sends: Tensors, recvs: Tensors, *, async_op: Sync = ..., timeout: Seconds = ...) -> None: ...
    @overload
    def all_to_all(self, sends: Tensors, recvs: Tensors, *, async_op: Async, timeout: Seconds = ...) -> Ticket: ...
    def all_to_all(
        self,
        sends: Sequence[Tensor],
        recvs: Sequence[Tensor],
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send sends[r] to rank r and fill recvs[r] from rank r; sizes may differ from pair to pair."""
        checks.check_all_to_all(sends, recvs, timeout, self.rank, self.world_size)
        return self.run_operation(
            "all_to_all", lambda: self.do_all_to_all(sends, recvs, timeout), async_op, sends, recvs
        )

    @overload
    def all_gather_into(
        self, out: Tensor | Tensors, tensor: Tensor, *, async_op: Sync = ..., timeout: Seconds = ...
    ) -> Tensor | Tensors: ...
    @overload
    def all_gather_into(
        self, out: Tensor | Tensors, tensor: Tensor, *, async_op: Async, timeout: Seconds = ...
    ) -> Ticket: ...
    def all_gather_into(
        self, out: Tensor | Tensors, tensor: Tensor, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Fill `out` with every rank's tensor, in rank order; all have the same number of elements.

        `out` is one tensor, of which `tensor` may be this rank's part, or a list with a tensor for each rank.
        """
        checks.check_all_gather_into(out, tensor, timeout, self.world_size)
        received = [out] if isinstance(out, Tensor) else out
        return self.run_operation(
            "all_gather_into", lambda: self.do_all_gather_into(out, tensor, timeout), async_op, [tensor], received
        )

    @overload
    def reduce_scatter_into(
        self, out: Tensor, tensor: Tensor | Tensors, op: Op = ..., *, async_op: Sync = ..., timeout: Seconds = ...
    ) -> Tensor: ...
    @overload
    def reduce_scatter_into(
        self, out: Tensor, tensor: Tensor | Tensors, op: Op = ..., *, async_op: Async, timeout: Seconds = ...
    ) -> Ticket: ...
    def reduce_scatter_into(
        self,
        out: Tensor,
        tensor: Tensor | Tensors,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduce `tensor` over all ranks, in rank order, and fill `out` with this rank's equal part of the result.

        `tensor` is one tensor, of which `out` may be this rank's part, or a list with a part for each rank.
        """
        op = checks.check_reduce_scatter_into(out, tensor, op, timeout, self.world_size)
        sent = [tensor] if isinstance(tensor, Tensor) else tensor
        return self.run_operation(
            "reduce_scatter_into", lambda: self.do_reduce_scatter_into(out, tensor, op, timeout), async_op, sent, [out]
        )

    # Memory

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed one-dimensional tensor on which collectives need no copy, where the transport can offer one.

        Not collective: ranks may allocate what and when they like. Slices of it are as good as the whole.
        """
        checks.check_allocation(numel, dtype, device)
        try:
            return torch.zeros(numel, dtype=dtype, device=device)
        except RuntimeError as error:
            own = self.reporter.own
            raise TransportError(
                f"rank {own} cannot allocate {numel} elements of {dtype} on {device}: {str(error).splitlines()[0]} "
                "Use smaller buffers.",
                rank=own,
                operation="allocate",
            ) from error


def check_transport(transport: object) -> None:
    """Raise `ConfigError` unless `transport` is one."""
    if not isinstance(transport, Transport):
        raise ConfigError(f"transport={transport!r} is no Transport. Pass what connect() or run_world() gives.")
