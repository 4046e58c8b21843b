"""Arguments of operations: checked before anything is sent, described in words, and flattened for the transport."""

from __future__ import annotations

import functools
import logging
import operator
import threading
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

from murmura.collectives.reduction import check_reducible
from murmura.errors import ConfigError, UsageError
from murmura.types import ReduceOp

log = logging.getLogger("murmura")

Pairs: TypeAlias = Sequence[tuple[Tensor, int]]
"""The messages of an exchange: tensors, each with the rank that it goes to or comes from."""

Tensors: TypeAlias = Sequence[Tensor]


class Check(StrEnum):
    """When ranks compare what they call."""

    BEST_EFFORT = "best_effort"  # after a time-out, as far as the store can tell
    ALWAYS = "always"  # before every operation, for a round trip


def check_rank(rank: int, world_size: int, what: str) -> None:
    """Refuse what is no rank of the world; `what` is the argument's name."""
    if not is_whole(rank) or not 0 <= rank < world_size:
        raise UsageError(f"{what}={rank!r} is not a rank of this world: ranks go from 0 to {world_size - 1}.")


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number, of Python, numpy or torch."""
    try:
        operator.index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return False
    return not isinstance(value, bool)


def check_timeout(timeout: float | None, refuse: type[UsageError | ConfigError] = UsageError) -> None:
    """Refuse what no wait can last: without a deadline a rank would wait for ever."""
    if timeout is None:
        return
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not (is_number and 0 < timeout <= threading.TIMEOUT_MAX):
        raise refuse(f"timeout={timeout!r} is not a number of seconds above 0. Pass a finite one.")


def check_members(members: Iterable[int], world_size: int) -> tuple[int, ...]:
    """Refuse a list of ranks that is no subgroup of the world; return it as a tuple."""
    is_list = isinstance(members, Iterable) and getattr(members, "ndim", 1) != 0  # an array may be one number
    ranks = tuple(members) if is_list else ()
    if not is_list or not all(map(is_whole, ranks)):
        raise UsageError(f"ranks={members!r} is no list of ranks. Give some from 0 to {world_size - 1}: [0, 1].")
    ranks = tuple(map(operator.index, ranks))
    if not ranks or len(set(ranks)) != len(ranks):
        raise UsageError(f"ranks={list(ranks)} must name at least one rank, and none twice.")
    for rank in ranks:
        check_rank(rank, world_size, "ranks")
    return ranks


def check_name(name: str) -> None:
    """Refuse what cannot name a channel."""
    if not isinstance(name, str):
        raise UsageError(f"name={name!r} cannot name a channel: give a string.")


def check_allocation(numel: int, dtype: torch.dtype, device: torch.device | str) -> None:
    """Refuse what is no length, dtype and device of a tensor."""
    if not is_whole(numel) or numel < 0:
        raise UsageError(f"numel={numel!r} must be a whole number of elements, at least 0.")
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"dtype={dtype!r} is no dtype. Give one of torch's, such as torch.float32.")
    try:
        torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageError(f"device={device!r} is no device. Give one of torch's, such as 'cpu' or 'cuda:0'.") from None


def check_dense(tensor: Tensor, what: str = "tensor") -> None:
    """Refuse what is no tensor, or has no plain data; `what` is the argument's name."""
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{what}={tensor!r} is no tensor. Send numbers as torch.tensor(...).")
    if tensor.layout is not torch.strided:
        raise UsageError(f"a {tensor.layout} tensor cannot be exchanged; call .to_dense() first.")
    if tensor.device.type == "meta":
        raise UsageError("a tensor on the meta device has no data to exchange.")


def check_writable(tensor: Tensor, what: str = "tensor") -> None:
    """Refuse what is no tensor that can be written element by element."""
    check_dense(tensor, what)
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
    if not _is_list(tensors) or len(tensors) != world_size:
        count = len(tensors) if _is_list(tensors) else "none"
        raise UsageError(f"{what} must hold one tensor for each of the {world_size} ranks, but holds {count}.")
    for tensor in tensors:
        check_dense(tensor, what)


def _is_list(tensors: object) -> TypeGuard[Sequence[Tensor]]:
    """Whether `tensors` has parts; rows of a tensor are as good as a list."""
    return isinstance(tensors, Sequence) or (isinstance(tensors, Tensor) and tensors.dim() > 0)


# The arguments of each operation

PAIRS = "give a list of pairs, each of a tensor and a rank: [(tensor, 1)]."


def check_exchange(sends: Pairs, recvs: Pairs, timeout: float | None, rank: int, world_size: int) -> None:
    check_timeout(timeout)
    for name, what, pairs in (("sends", "dst", sends), ("recvs", "src", recvs)):
        if not isinstance(pairs, Sequence):
            raise UsageError(f"{name}={pairs!r}: {PAIRS}")
        for pair in pairs:
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise UsageError(f"{name} holds {pair!r}: {PAIRS}")
            tensor, peer = pair
            check_rank(peer, world_size, what)
            given: object = peer
            if isinstance(given, Tensor):  # no two of them are the same key
                raise UsageError(f"{what}={peer!r} is a tensor. Give its number, int({what}).")
            if peer == rank:
                raise UsageError(f"rank {peer} cannot exchange with itself ({what}={peer}); copy the tensor instead.")
            check_dense(tensor, name)
    for tensor, _ in recvs:
        check_writable(tensor)


def check_all_reduce(tensor: Tensor, op: ReduceOp | str, out: Tensor | None, timeout: float | None) -> ReduceOp:
    check_timeout(timeout)
    check_dense(tensor)
    op = check_reducible(op, tensor.dtype)
    target = tensor if out is None else out
    check_dense(target, "out")
    if target.shape != tensor.shape or target.dtype != tensor.dtype or target.device != tensor.device:
        raise UsageError(
            f"out is {describe(target)} on {target.device}, but the tensor is {describe(tensor)} on {tensor.device}. "
            "Make out with torch.empty_like(tensor)."
        )
    check_writable(target)
    return op


def check_broadcast(tensor: Tensor, src: int, timeout: float | None, world_size: int) -> None:
    check_timeout(timeout)
    check_rank(src, world_size, "src")
    check_writable(tensor)


def check_reduce(tensor: Tensor, dst: int, op: ReduceOp | str, timeout: float | None, world_size: int) -> ReduceOp:
    check_timeout(timeout)
    check_rank(dst, world_size, "dst")
    check_writable(tensor)
    return check_reducible(op, tensor.dtype)


def check_reduce_scatter(tensor: Tensor, op: ReduceOp | str, timeout: float | None) -> ReduceOp:
    check_timeout(timeout)
    check_dense(tensor)
    return check_reducible(op, tensor.dtype)


def check_all_gather_into(out: Tensor | Tensors, tensor: Tensor, timeout: float | None, world_size: int) -> None:
    check_timeout(timeout)
    check_dense(tensor)
    _check_parts(out, tensor, world_size, "out", "tensor")
    for each in [out] if isinstance(out, Tensor) else out:
        check_writable(each, "out")


def check_reduce_scatter_into(
    out: Tensor, tensor: Tensor | Tensors, op: ReduceOp | str, timeout: float | None, world_size: int
) -> ReduceOp:
    check_timeout(timeout)
    check_writable(out, "out")
    _check_parts(tensor, out, world_size, "tensor", "out")
    return check_reducible(op, out.dtype)


def _check_parts(whole: Tensor | Tensors, part: Tensor, world_size: int, what: str, than: str) -> None:
    """Refuse a `whole`, one tensor or a list, that is not `world_size` times `part`."""
    if isinstance(whole, Tensor):
        check_dense(whole)
        fits = whole.numel() == world_size * part.numel() and whole.dtype == part.dtype
        wanted = f"{world_size} x {part.numel()} elements of {part.dtype}"
        told = f"{whole.numel()} elements of {whole.dtype}"
    else:
        check_list(whole, world_size, what)
        fits = all(each.numel() == part.numel() and each.dtype == part.dtype for each in whole)
        wanted = f"a tensor of {part.numel()} elements of {part.dtype} for each rank"
        told = ", ".join(describe(each) for each in whole)
    if not fits:
        raise UsageError(f"{what} has {told}, but {than} is {describe(part)}: {what} must have {wanted}.")


def check_gather(tensor: Tensor, dst: int, timeout: float | None, world_size: int) -> None:
    check_timeout(timeout)
    check_rank(dst, world_size, "dst")
    check_dense(tensor)


def check_scatter(
    tensors: Sequence[Tensor] | None, src: int, out: Tensor, timeout: float | None, rank: int, world_size: int
) -> None:
    check_timeout(timeout)
    check_rank(src, world_size, "src")
    check_writable(out, "out")
    if rank == src:
        check_list(tensors, world_size, "tensors")
        if tensors is not None and describe(tensors[rank]) != describe(out):
            raise UsageError(f"rank {rank} scatters {describe(tensors[rank])} to itself but wants {describe(out)}.")


def check_all_to_all(
    sends: Sequence[Tensor], recvs: Sequence[Tensor], timeout: float | None, rank: int, world_size: int
) -> None:
    check_timeout(timeout)
    check_list(sends, world_size, "sends")
    check_list(recvs, world_size, "recvs")
    for tensor in recvs:
        check_writable(tensor, "recvs")
    if describe(sends[rank]) != describe(recvs[rank]):
        raise UsageError(f"rank {rank} sends itself {describe(sends[rank])} but wants {describe(recvs[rank])}.")


# Words


# Cached: a training loop reduces the same few buffers for ever, and every collective needs its words.


def describe(tensor: Tensor) -> str:
    """Dtype and shape, the part of a call that ranks must agree on: "float32[3, 4]"."""
    return _describe(tensor.dtype, tensor.shape)


@functools.lru_cache(maxsize=4096)
def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def describe_call(operation: str, argument: str, tensor: Tensor) -> str:
    """A collective in words: "all_reduce(mean) of float32[3, 4]"."""
    return _describe_call(operation, argument, tensor.dtype, tensor.shape)


@functools.lru_cache(maxsize=4096)
def _describe_call(operation: str, argument: str, dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{operation}({argument}) of {_describe(dtype, shape)}"


def describe_rows(tensor: Tensor) -> str:
    """The same where first dimensions may differ: "float32[*, 4]"."""
    shape = ["*", *map(str, tensor.shape[1:])] if tensor.dim() else []
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(shape)}]"


def describe_exchange(sends: Pairs, recvs: Pairs) -> str:
    """An exchange in words: "exchange: send(dst=1) of float32[3], recv(src=2) of float32[3]"."""
    messages = [f"send(dst={dst}) of {describe(tensor)}" for tensor, dst in sends]
    messages += [f"recv(src={src}) of {describe(out)}" for out, src in recvs]
    return "exchange: " + ", ".join(messages)


# Flat tensors


def flatten(tensor: Tensor, device: torch.device | None, *, load: bool = True) -> Tensor:
    """A contiguous one-dimensional tensor of `tensor`'s elements in the memory of `device`: a view if possible.

    A copy holds the values of `tensor` only if `load`; `bring_back` copies them back. None means any device.
    """
    tensor = tensor.detach()
    target = tensor.device if device is None or tensor.device.type == device.type else device
    if target != tensor.device or not tensor.is_contiguous():
        if target.type != tensor.device.type and tensor.device.type != "cpu":
            _announce_staging(tensor.device.type, target.type)
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=target)
        if load:
            flat.view(tensor.shape).copy_(tensor)
        return flat
    flat = tensor.resolve_conj().resolve_neg().view(-1)
    # A single element may have any stride and be contiguous all the same; a view of its bytes needs 1.
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


@functools.cache  # once for each pair of devices
def _announce_staging(source: str, target: str) -> None:
    log.warning(
        "tensors on %s are staged through %s memory by this transport, which takes time. If each rank has a GPU of its "
        "own, use NCCL: torch.distributed.init_process_group('nccl') before DDP, or connect(device='cuda'). Several "
        "ranks on one GPU have no faster way.",
        source,
        "host" if target == "cpu" else target,
    )


def bring_back(flat: Tensor, target: Tensor) -> None:
    """Copy the elements of `flat` back to the tensor that `flatten` made it of, unless it is a view of it."""
    if flat.data_ptr() != target.data_ptr() or not target.is_contiguous():
        target.detach().copy_(flat.view(target.shape))
