"""Operations: what each operation of a transport does, in its turn, with arguments that have been checked.

`Transport` inherits it. Every collective is written once here, as a ring or a tree over `exchange`; a transport that
can do better overrides one of the last group, and a decorator hands each `do_` to the transport inside.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from murmura.collectives import gather, ring
from murmura.transports.checks import Pairs, Tensors, bring_back, describe_call, describe_rows, flatten
from murmura.transports.endpoint import Endpoint
from murmura.types import ReduceOp


class Operations(Endpoint):
    """See the module."""

    device: torch.device | None = None

    @abstractmethod
    def exchange(self, sends: Pairs, recvs: Pairs, *, timeout: float | None = None) -> None:
        """See `Transport`, which defines it."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Any:
        """See `Transport`, which defines it."""

    @abstractmethod
    def do_exchange(self, sends: Pairs, recvs: Pairs, timeout: float | None) -> None:
        """Carry out `exchange`, whose arguments have been checked; runs in its turn, in some thread."""

    def do_all_reduce(self, tensor: Tensor, op: ReduceOp, out: Tensor | None, timeout: float | None) -> Tensor:
        target = tensor if out is None else out
        flat_out = flatten(target, self.device, load=out is None)
        flat_in = flat_out if out is None else flatten(tensor, self.device)
        if self.world_size == 1:
            flat_out.copy_(flat_in)
        else:
            self.all_reduce_flat(flat_in, flat_out, op, describe_call("all_reduce", op, tensor), timeout)
        bring_back(flat_out, target)
        return target

    def do_broadcast(self, tensor: Tensor, src: int, timeout: float | None) -> Tensor:
        if self.world_size > 1:
            flat = flatten(tensor, self.device, load=self.rank == src)
            self.broadcast_flat(flat, src, describe_call("broadcast", f"src={src}", tensor), timeout)
            bring_back(flat, tensor)
        return tensor

    def do_barrier(self, timeout: float | None) -> None:
        self.compare_calls("barrier()", timeout)
        ring.barrier(self, timeout=self.seconds(timeout))

    def do_reduce(self, tensor: Tensor, dst: int, op: ReduceOp, timeout: float | None) -> Tensor:
        self.compare_calls(describe_call("reduce", f"{op}, dst={dst}", tensor), timeout)
        flat = flatten(tensor, self.device)
        if self.world_size > 1:
            gather.reduce(self, flat, dst, op, timeout=self.seconds(timeout))
        if self.rank == dst:
            bring_back(flat, tensor)
        return tensor

    def do_reduce_scatter(self, tensor: Tensor, op: ReduceOp, timeout: float | None) -> Tensor:
        self.compare_calls(describe_call("reduce_scatter", op, tensor), timeout)
        flat = flatten(tensor, self.device)
        if self.world_size == 1:
            return flat.clone().to(tensor.device)
        return gather.reduce_scatter(self, flat, op, timeout=self.seconds(timeout)).to(tensor.device)

    def do_all_gather(self, tensor: Tensor, timeout: float | None) -> list[Tensor]:
        self.compare_calls(f"all_gather() of {describe_rows(tensor)}", timeout)
        return gather.all_gather(self, tensor.detach().contiguous(), timeout=self.seconds(timeout))

    def do_gather(self, tensor: Tensor, dst: int, timeout: float | None) -> list[Tensor] | None:
        self.compare_calls(f"gather(dst={dst}) of {describe_rows(tensor)}", timeout)
        return gather.gather(self, tensor.detach().contiguous(), dst, timeout=self.seconds(timeout))

    def do_scatter(self, tensors: Tensors | None, src: int, out: Tensor, timeout: float | None) -> Tensor:
        self.compare_calls(f"scatter(src={src})", timeout)
        gather.scatter(self, tensors, src, out.detach(), timeout=self.seconds(timeout))
        return out

    def do_all_to_all(self, sends: Tensors, recvs: Tensors, timeout: float | None) -> None:
        self.compare_calls("all_to_all()", timeout)
        gather.all_to_all(self, sends, [out.detach() for out in recvs], timeout=self.seconds(timeout))

    def do_all_gather_into(self, out: Tensor | Tensors, tensor: Tensor, timeout: float | None) -> Tensor | Tensors:
        targets = [out] if isinstance(out, Tensor) else out
        flats = [flatten(each, self.device, load=False) for each in targets]
        parts = flats[0].chunk(self.world_size) if isinstance(out, Tensor) and tensor.numel() else flats
        own = flatten(tensor, self.device)
        if self.world_size == 1 or not own.numel():
            self.compare_calls(describe_call("all_gather_into", "", own), timeout)
            for part in parts:
                part.copy_(own)
        else:
            if own.data_ptr() != parts[self.rank].data_ptr() and any(_overlap(own, part) for part in parts):
                own = own.clone()  # another rank's part is written before all have read this one
            self.all_gather_flat(parts, own, describe_call("all_gather_into", "", own), timeout)
        for flat, target in zip(flats, targets, strict=True):
            bring_back(flat, target)
        return out

    def do_reduce_scatter_into(
        self, out: Tensor, tensor: Tensor | Tensors, op: ReduceOp, timeout: float | None
    ) -> Tensor:
        sources = [tensor] if isinstance(tensor, Tensor) else tensor
        flats = [flatten(each, self.device) for each in sources]
        parts = flats[0].chunk(self.world_size) if isinstance(tensor, Tensor) and out.numel() else flats
        flat = flatten(out, self.device, load=False)
        if self.world_size == 1 or not flat.numel():
            self.compare_calls(describe_call("reduce_scatter_into", op, flat), timeout)
            flat.copy_(parts[0])
        else:
            call = describe_call("reduce_scatter_into", op, flat)
            if _overlap(flat, parts[self.rank]):  # what is reduced may be the first input only
                parts = [each.clone() if rank == self.rank else each for rank, each in enumerate(parts)]
            self.reduce_scatter_flat(flat, parts, op, call, timeout)
        bring_back(flat, out)
        return out

    def all_reduce_own(self, flat: Tensor, op: ReduceOp) -> None:
        """As `all_reduce` in place, of a flat tensor of the library's own, which needs no checks."""
        self.all_reduce(flat, op)

    # For transports that can do better, with flat contiguous tensors; `call` is what the ranks must agree on, in words

    def all_reduce_flat(
        self, flat_in: Tensor, flat_out: Tensor, op: ReduceOp, call: str, timeout: float | None
    ) -> None:
        """Reduce `flat_in` over all ranks into `flat_out`, which may be the same tensor."""
        self.compare_calls(call, timeout)
        if flat_out is not flat_in:
            flat_out.copy_(flat_in)
        ring.all_reduce(self, flat_out, op, timeout=self.seconds(timeout))

    def broadcast_flat(self, flat: Tensor, src: int, call: str, timeout: float | None) -> None:
        """Overwrite `flat` with rank `src`'s."""
        self.compare_calls(call, timeout)
        ring.broadcast(self, flat, src, timeout=self.seconds(timeout))

    def all_gather_flat(self, parts: Tensors, own: Tensor, call: str, timeout: float | None) -> None:
        """Fill `parts`, one for each rank, from every rank's `own`, which may be this rank's part."""
        self.compare_calls(call, timeout)
        gather.all_gather_into(self, parts, own, timeout=self.seconds(timeout))

    def reduce_scatter_flat(self, out: Tensor, parts: Tensors, op: ReduceOp, call: str, timeout: float | None) -> None:
        """Reduce every rank's `parts[r]` into the `out` of rank r, which overlaps none of its parts."""
        self.compare_calls(call, timeout)
        gather.reduce_scatter_into(self, out, parts, op, timeout=self.seconds(timeout))

    def compare_calls(self, call: str, timeout: float | None) -> None:
        """Raise `CollectiveMismatch` if the ranks called something else; a transport that cannot tell does nothing."""
        return


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
