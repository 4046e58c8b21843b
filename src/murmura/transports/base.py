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

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from murmura.collectives import gather, ring
from murmura.errors import TransportError, UsageError
from murmura.transports.checks import (
    check_all_reduce,
    check_all_to_all,
    check_broadcast,
    check_dense,
    check_gather,
    check_rank,
    check_reduce,
    check_reduce_scatter,
    check_scatter,
    check_timeout,
    check_writable,
    describe,
    describe_rows,
    store,
)
from murmura.transports.core import TransportCore
from murmura.transports.serial_executor import Ticket
from murmura.types import ReduceOp

__all__ = ["Transport"]

Pairs = Sequence[tuple[Tensor, int]]


class Transport(TransportCore):
    """A rank's end of a world of ranks that exchange tensors.

    Attributes:
        rank: this rank, from 0.
        world_size: the number of ranks.
        hosts: hosts[r] is the index of the host of rank r.
        timeout: seconds any wait may last unless a call says otherwise.
    """

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

    # Conveniences over exchange and split

    def channel(self, name: str) -> Transport:
        """The same ranks with an order of their own, so that what runs on it waits for nothing here."""
        self.announce()
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
        check_timeout(timeout)
        op = check_all_reduce(tensor, op, out)
        target = tensor if out is None else out

        def work() -> Tensor:
            flat_out = self._flat(target, load=out is None)
            flat_in = flat_out if out is None else self._flat(tensor, load=True)
            if self.world_size == 1:
                flat_out.copy_(flat_in)
            else:
                self._all_reduce(flat_in, flat_out, op, f"({op}) of {describe(tensor)}", timeout)
            store(flat_out, target)
            return target

        return self._operate("all_reduce", work, async_op, [tensor])  # type: ignore[no-any-return]

    def broadcast(
        self, tensor: Tensor, src: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Tensor | Ticket:
        """Overwrite `tensor` on every rank with rank `src`'s; returns it, or a `Ticket`."""
        check_timeout(timeout)
        check_broadcast(tensor, src, self.world_size)

        def work() -> Tensor:
            flat = self._flat(tensor, load=self.rank == src)
            if self.world_size > 1:
                self._broadcast(flat, src, f"(src={src}) of {describe(tensor)}", timeout)
                store(flat, tensor)
            return tensor

        return self._operate("broadcast", work, async_op, [tensor] if self.rank == src else ())  # type: ignore[no-any-return]

    def barrier(self, timeout: float | None = None) -> None:
        """Return once every rank has called."""
        check_timeout(timeout)

        def work() -> None:
            if self.world_size > 1:
                self._barrier(timeout)

        self._operate("barrier", work, async_op=False)

    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Tensor | Ticket:
        """Reduce `tensor` over all ranks, in rank order, into rank `dst`'s; on the others it stays as it is."""
        check_timeout(timeout)
        op = check_reduce(tensor, dst, op, self.world_size)

        def work() -> Tensor:
            self._agree(f"reduce({op}, dst={dst}) of {describe(tensor)}", timeout)
            flat = self._flat(tensor, load=True)
            if self.world_size > 1:
                self._reduce(flat, dst, op, timeout)
            if self.rank == dst:
                store(flat, tensor)
            return tensor

        return self._operate("reduce", work, async_op, [tensor] if self.rank != dst else ())  # type: ignore[no-any-return]

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp | str = ReduceOp.SUM,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Tensor | Ticket:
        """Reduce over all ranks, in rank order, and return this rank's chunk: one-dimensional, and new.

        Chunk i of D elements over n ranks has D // n + (i < D % n) elements.
        """
        check_timeout(timeout)
        op = check_reduce_scatter(tensor, op)

        def work() -> Tensor:
            self._agree(f"reduce_scatter({op}) of {describe(tensor)}", timeout)
            flat = self._flat(tensor, load=True)
            chunk = flat.clone() if self.world_size == 1 else self._reduce_scatter(flat, op, timeout)
            return chunk.to(tensor.device)

        return self._operate("reduce_scatter", work, async_op, [tensor])  # type: ignore[no-any-return]

    def all_gather(
        self, tensor: Tensor, *, async_op: bool = False, timeout: float | None = None
    ) -> list[Tensor] | Ticket:
        """Every rank's tensor, in rank order, as new tensors; first dimensions may differ."""
        check_timeout(timeout)
        check_dense(tensor)

        def work() -> list[Tensor]:
            self._agree(f"all_gather() of {describe_rows(tensor)}", timeout)
            return self._all_gather(tensor.detach().contiguous(), timeout)

        return self._operate("all_gather", work, async_op, [tensor])  # type: ignore[no-any-return]

    def gather(
        self, tensor: Tensor, dst: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> list[Tensor] | Ticket | None:
        """Every rank's tensor, in rank order, on rank `dst`; None elsewhere. First dimensions may differ."""
        check_timeout(timeout)
        check_gather(tensor, dst, self.world_size)

        def work() -> list[Tensor] | None:
            self._agree(f"gather(dst={dst}) of {describe_rows(tensor)}", timeout)
            return gather.gather(self, tensor.detach().contiguous(), dst, timeout=self._seconds(timeout))

        return self._operate("gather", work, async_op, [tensor])  # type: ignore[no-any-return]

    def scatter(
        self,
        tensors: Sequence[Tensor] | None,
        src: int = 0,
        *,
        out: Tensor,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Tensor | Ticket:
        """Fill `out` with this rank's entry of rank `src`'s `tensors`, which only rank `src` gives."""
        check_timeout(timeout)
        check_scatter(tensors, src, out, self.rank, self.world_size)

        def work() -> Tensor:
            self._agree(f"scatter(src={src})", timeout)
            gather.scatter(self, tensors, src, out.detach(), timeout=self._seconds(timeout))
            return out

        return self._operate("scatter", work, async_op, tensors or ())  # type: ignore[no-any-return]

    def all_to_all(
        self,
        sends: Sequence[Tensor],
        recvs: Sequence[Tensor],
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Ticket | None:
        """Send sends[r] to rank r and fill recvs[r] from rank r; sizes may differ from pair to pair."""
        check_timeout(timeout)
        check_all_to_all(sends, recvs, self.rank, self.world_size)

        def work() -> None:
            self._agree("all_to_all()", timeout)
            outs = [out.detach() for out in recvs]
            gather.all_to_all(self, sends, outs, timeout=self._seconds(timeout))

        return self._operate("all_to_all", work, async_op, sends)  # type: ignore[no-any-return]

    # Memory

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """A zeroed one-dimensional tensor on which collectives need no copy, where the backend can offer one.

        Not collective: ranks may allocate what and when they like. Slices of it are as good as the whole.
        """
        try:
            return torch.zeros(numel, dtype=dtype, device=device)
        except RuntimeError as error:
            own = self._reporter.own
            raise TransportError(
                f"rank {own} cannot allocate {numel} elements of {dtype} on {device}: {str(error).splitlines()[0]} "
                "Use smaller buffers.",
                rank=own,
                operation="allocate",
            ) from error

    # For backends

    def _all_reduce(self, flat_in: Tensor, flat_out: Tensor, op: ReduceOp, call: str, timeout: float | None) -> None:
        self._agree("all_reduce" + call, timeout)
        if flat_out is not flat_in:
            flat_out.copy_(flat_in)
        ring.all_reduce(self, flat_out, op, timeout=self._seconds(timeout))

    def _broadcast(self, flat: Tensor, src: int, call: str, timeout: float | None) -> None:
        self._agree("broadcast" + call, timeout)
        ring.broadcast(self, flat, src, timeout=self._seconds(timeout))

    def _agree(self, call: str, timeout: float | None) -> None:
        """Raise `CollectiveMismatch` if the ranks called something else; here, where a backend cannot tell, do not."""
        return

    def _reduce(self, flat: Tensor, dst: int, op: ReduceOp, timeout: float | None) -> None:
        gather.reduce(self, flat, dst, op, timeout=self._seconds(timeout))

    def _reduce_scatter(self, flat: Tensor, op: ReduceOp, timeout: float | None) -> Tensor:
        return gather.reduce_scatter(self, flat, op, timeout=self._seconds(timeout))

    def _all_gather(self, tensor: Tensor, timeout: float | None) -> list[Tensor]:
        return gather.all_gather(self, tensor, timeout=self._seconds(timeout))

    def _barrier(self, timeout: float | None) -> None:
        self._agree("barrier()", timeout)
        ring.barrier(self, timeout=self._seconds(timeout))

    def _check_pairs(self, sends: Pairs, recvs: Pairs, timeout: float | None = None) -> None:
        """Refuse an exchange that makes no sense, before anything is sent."""
        check_timeout(timeout)
        for what, pairs in (("dst", sends), ("src", recvs)):
            for tensor, peer in pairs:
                check_rank(peer, self.world_size, what)
                if peer == self.rank:
                    raise UsageError(
                        f"rank {peer} cannot exchange with itself ({what}={peer}); copy the tensor instead."
                    )
                check_dense(tensor)
        for tensor, _ in recvs:
            check_writable(tensor)
