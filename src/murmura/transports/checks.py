"""What a transport asks of its arguments before anything is sent, and how it writes them in words."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor

from murmura.collectives.reduction import check_reducible
from murmura.errors import ConfigError, UsageError
from murmura.types import ReduceOp


class Check(StrEnum):
    """When ranks compare what they call."""

    BEST_EFFORT = "best_effort"  # after a time-out, as far as the store can tell
    ALWAYS = "always"  # before every operation, for a round trip


def check_rank(rank: int, world_size: int, what: str) -> None:
    """Refuse a number that is no rank of the world; `what` is the argument's name."""
    if not 0 <= rank < world_size:
        raise UsageError(f"{what}={rank} is not a rank of this world: ranks go from 0 to {world_size - 1}.")


def check_timeout(timeout: float | None, refuse: type[UsageError | ConfigError] = UsageError) -> None:
    """Refuse what no wait can last: without a deadline a rank would wait for ever."""
    if timeout is None:
        return
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (is_number and 0 < timeout <= threading.TIMEOUT_MAX):
        raise refuse(f"timeout={timeout!r} is not a number of seconds above 0. Pass a finite one.")


def check_members(members: Sequence[int], world_size: int) -> None:
    """Refuse a list of ranks that is no subgroup of the world."""
    if not members or len(set(members)) != len(members):
        raise UsageError(f"ranks={list(members)} must name at least one rank, and none twice.")
    for member in members:
        check_rank(member, world_size, "ranks")


def check_dense(tensor: Tensor) -> None:
    """Refuse a tensor without plain data."""
    if tensor.layout is not torch.strided:
        raise UsageError(f"a {tensor.layout} tensor cannot be exchanged; call .to_dense() first.")
    if tensor.device.type == "meta":
        raise UsageError("a tensor on the meta device has no data to exchange.")


def check_writable(tensor: Tensor) -> None:
    """Refuse a tensor that cannot be written element by element."""
    check_dense(tensor)
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UsageError("an inference tensor can only be written inside torch.inference_mode(); call .clone() first.")
    if tensor.is_contiguous():
        return
    span = 0  # elements between the first and the last that the dimensions so far reach
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= span:
            raise UsageError("an expanded or overlapping tensor holds elements twice; call .clone() first to write it.")
        span += stride * (size - 1)


def check_list(tensors: Sequence[Tensor] | None, world_size: int, what: str) -> None:
    """Refuse a list of tensors that does not have one for each rank."""
    if tensors is None or len(tensors) != world_size:
        count = "none" if tensors is None else len(tensors)
        raise UsageError(f"{what} must hold one tensor for each of the {world_size} ranks, but holds {count}.")
    for tensor in tensors:
        check_dense(tensor)


# The arguments of each collective


def check_all_reduce(tensor: Tensor, op: ReduceOp | str, out: Tensor | None) -> ReduceOp:
    op = check_reducible(op, tensor.dtype)
    target = tensor if out is None else out
    if target.shape != tensor.shape or target.dtype != tensor.dtype or target.device != tensor.device:
        raise UsageError(
            f"out is {describe(target)} on {target.device}, but the tensor is {describe(tensor)} on {tensor.device}. "
            "Make out with torch.empty_like(tensor)."
        )
    check_dense(tensor)
    check_writable(target)
    return op


def check_broadcast(tensor: Tensor, src: int, world_size: int) -> None:
    check_rank(src, world_size, "src")
    check_writable(tensor)


def check_reduce(tensor: Tensor, dst: int, op: ReduceOp | str, world_size: int) -> ReduceOp:
    op = check_reducible(op, tensor.dtype)
    check_rank(dst, world_size, "dst")
    check_writable(tensor)
    return op


def check_reduce_scatter(tensor: Tensor, op: ReduceOp | str) -> ReduceOp:
    check_dense(tensor)
    return check_reducible(op, tensor.dtype)


def check_gather(tensor: Tensor, dst: int, world_size: int) -> None:
    check_rank(dst, world_size, "dst")
    check_dense(tensor)


def check_scatter(tensors: Sequence[Tensor] | None, src: int, out: Tensor, rank: int, world_size: int) -> None:
    check_rank(src, world_size, "src")
    check_writable(out)
    if rank == src:
        check_list(tensors, world_size, "tensors")


def check_all_to_all(sends: Sequence[Tensor], recvs: Sequence[Tensor], rank: int, world_size: int) -> None:
    check_list(sends, world_size, "sends")
    check_list(recvs, world_size, "recvs")
    for tensor in recvs:
        check_writable(tensor)
    if describe(sends[rank]) != describe(recvs[rank]):
        raise UsageError(f"rank {rank} sends itself {describe(sends[rank])} but wants {describe(recvs[rank])}.")


# Words


def describe(tensor: Tensor) -> str:
    """Dtype and shape, the part of a call that ranks must agree on: "float32[3, 4]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def describe_rows(tensor: Tensor) -> str:
    """The same where first dimensions may differ: "float32[*, 4]"."""
    shape = ["*", *map(str, tensor.shape[1:])] if tensor.dim() else []
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(shape)}]"


def describe_exchange(sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> str:
    """An exchange in words: "exchange: send(dst=1) of float32[3], recv(src=2) of float32[3]"."""
    messages = [f"send(dst={dst}) of {describe(tensor)}" for tensor, dst in sends]
    messages += [f"recv(src={src}) of {describe(out)}" for out, src in recvs]
    return "exchange: " + ", ".join(messages)


def store(flat: Tensor, target: Tensor) -> None:
    """Bring the elements of a working copy back to the tensor it stands for, if it is a copy."""
    if flat.data_ptr() != target.data_ptr() or not target.is_contiguous():
        target.detach().copy_(flat.view(target.shape))
