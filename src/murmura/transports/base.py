"""The contract of a transport: how a tensor gets from rank to rank.

A backend writes `exchange`, `split` and `close`; every collective is inherited, as a ring or a tree over
`exchange`, and a backend that can do better overrides the underscored method of it. What holds for all:

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
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from murmura.collectives import ring
from murmura.collectives.reduction import check_reducible
from murmura.errors import CollectiveMismatch, TransportClosed, TransportError, UsageError, not_built
from murmura.transports.failures import again
from murmura.transports.order import Order, Ticket
from murmura.types import ReduceOp

__all__ = ["Transport"]

Pairs = Sequence[tuple[Tensor, int]]


class Transport(ABC):
    """A rank's end of a world of ranks that exchange tensors.

    Attributes:
        rank: this rank, from 0.
        world_size: the number of ranks.
        hosts: hosts[r] is the index of the host of rank r.
        timeout: seconds any wait may last unless a call says otherwise.
    """

    _stages_on_host = False
    """Whether tensors of other devices go through host memory: a backend that only knows CPU memory says True."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        hosts: Sequence[int] | None = None,
        timeout: float = 600.0,
        name: str = "",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.hosts: Sequence[int] = tuple(hosts) if hosts is not None else (0,) * world_size
        self.timeout = timeout
        self.name = name or "world"
        self._order = Order(f"{self.name}-rank{rank}")
        self._failure: BaseException | None = None
        self._closed = False
        self._operation = ""  # what runs now, for error messages
        self._num_collectives = 0

    # What a backend writes

    @abstractmethod
    def exchange(
        self, sends: Pairs, recvs: Pairs, *, async_op: bool = False, timeout: float | None = None
    ) -> Ticket | None:
        """Send each tensor of `sends` to its rank and fill each of `recvs` from its rank, all at once.

        Messages from one rank to another are matched in the order they were sent. A send is over when it has been
        received, so two ranks that both send before they receive must do so in one exchange.
        """

    @abstractmethod
    def split(self, name: str, ranks: Sequence[int] | None = None) -> Transport | None:
        """A transport with an order of its own: the same ranks (a channel), or fewer (a subgroup), or both.

        Called by every member; `ranks` are numbered anew in the order given. None for a rank that is not a member.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the world; peers that still wait for this rank get `PeerLost`. May be called again."""

    # Conveniences over exchange and split

    def channel(self, name: str) -> Transport:
        """The same ranks with an order of their own, so that what runs on it waits for nothing here."""
        channel = self.split(name)
        assert channel is not None  # every rank is a member
        return channel

    def subgroup(self, ranks: Sequence[int]) -> Transport | None:
        """The transport of `ranks` only; None on the other ranks."""
        return self.split("subgroup-" + "-".join(map(str, ranks)), ranks)

    def send(self, tensor: Tensor, dst: int, *, timeout: float | None = None) -> None:
        """Send `tensor` to rank `dst`; returns when it has been received."""
        self.exchange([(tensor, dst)], [], timeout=timeout)

    def recv(self, out: Tensor, src: int, *, timeout: float | None = None) -> Tensor:
        """Fill `out` from rank `src` and return it; dtype and shape must be those sent."""
        self.exchange([], [(out, src)], timeout=timeout)
        return out

    def isend(self, tensor: Tensor, dst: int, *, timeout: float | None = None) -> Ticket:
        """As `send`, in the channel's communication thread; the tensor is borrowed until ``wait``."""
        ticket = self.exchange([(tensor, dst)], [], async_op=True, timeout=timeout)
        assert ticket is not None
        return ticket

    def irecv(self, out: Tensor, src: int, *, timeout: float | None = None) -> Ticket:
        """As `recv`, in the channel's communication thread."""
        ticket = self.exchange([], [(out, src)], async_op=True, timeout=timeout)
        assert ticket is not None
        return ticket

    # Collectives

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Tensor | Ticket:
        """Reduce `tensor` over all ranks, in place or into `out`; every rank gets the same bits.

        Returns the tensor written, or a `Ticket` whose ``wait`` returns it.
        """
        op = check_reducible(op, tensor.dtype)
        target = tensor if out is None else out
        if target.shape != tensor.shape or target.dtype != tensor.dtype or target.device != tensor.device:
            raise UsageError(
                f"out is {_describe(target)} on {target.device}, but the tensor is {_describe(tensor)} on "
                f"{tensor.device}. Make out with torch.empty_like(tensor)."
            )
        _check_dense(tensor)
        _check_writable(target)

        def work() -> Tensor:
            flat_out = self._flat(target, load=out is None)
            flat_in = flat_out if out is None else self._flat(tensor, load=True)
            if self.world_size == 1:
                flat_out.copy_(flat_in)
            else:
                self._all_reduce(flat_in, flat_out, op, f"({op}) of {_describe(tensor)}", timeout)
            _store(flat_out, target)
            return target

        return self._run("all_reduce", work, async_op)  # type: ignore[no-any-return]

    def broadcast(
        self, tensor: Tensor, src: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Tensor | Ticket:
        """Overwrite `tensor` on every rank with rank `src`'s; returns it, or a `Ticket`."""
        self._check_rank(src, "src")
        _check_writable(tensor)

        def work() -> Tensor:
            flat = self._flat(tensor, load=self.rank == src)
            if self.world_size > 1:
                self._broadcast(flat, src, f"(src={src}) of {_describe(tensor)}", timeout)
                _store(flat, tensor)
            return tensor

        return self._run("broadcast", work, async_op)  # type: ignore[no-any-return]

    def barrier(self, timeout: float | None = None) -> None:
        """Return once every rank has called."""

        def work() -> None:
            if self.world_size > 1:
                self._barrier(timeout)

        self._run("barrier", work, async_op=False)

    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Tensor | Ticket:
        """Reduce `tensor` over all ranks into rank `dst`'s, in place; elsewhere it is scratch afterwards."""
        not_built("Transport.reduce")

    def all_gather(
        self, tensor: Tensor, *, async_op: bool = False, timeout: float | None = None
    ) -> list[Tensor] | Ticket:
        """Every rank's tensor, in rank order; first dimensions may differ."""
        not_built("Transport.all_gather")

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Tensor | Ticket:
        """Reduce over all ranks and return this rank's chunk; chunk i has D // n + (i < D % n) elements."""
        not_built("Transport.reduce_scatter")

    def gather(
        self, tensor: Tensor, dst: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> list[Tensor] | Ticket | None:
        """Every rank's tensor, in rank order, on rank `dst`; None elsewhere."""
        not_built("Transport.gather")

    def scatter(
        self,
        tensors: Sequence[Tensor] | None,
        src: int = 0,
        *,
        out: Tensor,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Tensor | Ticket:
        """Fill `out` with this rank's entry of rank `src`'s `tensors`."""
        not_built("Transport.scatter")

    def all_to_all(
        self,
        sends: Sequence[Tensor],
        recvs: Sequence[Tensor],
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Ticket | None:
        """Send sends[r] to rank r and fill recvs[r] from rank r; sizes may differ."""
        not_built("Transport.all_to_all")

    # Memory

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed one-dimensional tensor on which collectives need no copy, where the backend can offer one.

        Not collective: ranks may allocate what and when they like. Slices of it are as good as the whole.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    # Life

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        self.close()

    def abort(self, error: BaseException) -> None:
        """Poison the transport because of `error`, so that peers learn the cause before `close` ends it."""
        if self._failure is None:
            self._failure = error

    # For backends

    def _all_reduce(self, flat_in: Tensor, flat_out: Tensor, op: ReduceOp, call: str, timeout: float | None) -> None:
        if flat_out is not flat_in:
            flat_out.copy_(flat_in)
        ring.all_reduce(self, flat_out, op, timeout=self._seconds(timeout))

    def _broadcast(self, flat: Tensor, src: int, call: str, timeout: float | None) -> None:
        ring.broadcast(self, flat, src, timeout=self._seconds(timeout))

    def _barrier(self, timeout: float | None) -> None:
        ring.barrier(self, timeout=self._seconds(timeout))

    def _run(self, name: str, work: Callable[[], Any], async_op: bool) -> Any:
        """Run one operation in its turn: inline, or in the communication thread if `async_op`."""

        def turn() -> Any:
            self._check_usable()
            outermost = not self._operation
            if outermost:
                self._num_collectives += name != "exchange"
                self._operation = name if name == "exchange" else f"{name} #{self._num_collectives}"
            try:
                return work()
            except (TransportError, CollectiveMismatch, KeyboardInterrupt) as error:
                self.abort(error)
                raise
            finally:
                if outermost:
                    self._operation = ""

        if async_op:
            return self._order.submit(f"{name} on rank {self.rank}", turn)
        return self._order.run(turn)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise again(self._failure) from self._failure
        if self._closed:
            raise TransportClosed(
                f"rank {self.rank} closed this transport ({self.name}) before the call. Make a new one with connect().",
                rank=self.rank,
            )

    def _check_rank(self, rank: int, what: str) -> None:
        if not 0 <= rank < self.world_size:
            raise UsageError(f"{what}={rank} is not a rank of this world: ranks go from 0 to {self.world_size - 1}.")

    def _check_pairs(self, sends: Pairs, recvs: Pairs) -> None:
        """Refuse an exchange that makes no sense, before anything is sent."""
        for what, pairs in (("dst", sends), ("src", recvs)):
            for tensor, peer in pairs:
                self._check_rank(peer, what)
                if peer == self.rank:
                    raise UsageError(
                        f"rank {peer} cannot exchange with itself ({what}={peer}); copy the tensor instead."
                    )
                _check_dense(tensor)
        for tensor, _ in recvs:
            _check_writable(tensor)

    def _seconds(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    def _flat(self, tensor: Tensor, *, load: bool) -> Tensor:
        """A contiguous one-dimensional tensor of `tensor`'s elements where the backend can work: a view if possible.

        Holds the values of `tensor` if `load`; `_store` brings them back.
        """
        tensor = tensor.detach()
        if (self._stages_on_host and tensor.device.type != "cpu") or not tensor.is_contiguous():
            device = torch.device("cpu") if self._stages_on_host else tensor.device
            flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=device)
            if load:
                flat.view(tensor.shape).copy_(tensor)
            return flat
        return tensor.resolve_conj().resolve_neg().view(-1)


def _store(flat: Tensor, target: Tensor) -> None:
    if flat.data_ptr() != target.data_ptr() or not target.is_contiguous():
        target.detach().copy_(flat.view(target.shape))


def _check_dense(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise UsageError(f"a {tensor.layout} tensor cannot be exchanged; call .to_dense() first.")
        if tensor.device.type == "meta":
            raise UsageError("a tensor on the meta device has no data to exchange.")


def _check_writable(tensor: Tensor) -> None:
    _check_dense(tensor)
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError("an expanded tensor holds one element many times and cannot be written; call .clone() first.")


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
