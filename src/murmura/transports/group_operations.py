"""Operations on a process group of torch's, in its own terms."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from murmura.collectives.chunks import is_small
from murmura.collectives.deadline import Deadline
from murmura.collectives.reduction import BITWISE
from murmura.transports.checks import Pairs, flatten
from murmura.types import ReduceOp

PART_BYTES = 2**20
UNUSED_TAG = 2**31 - 1
FIRST_SIZE_TAG, MAX_SIZE_TAGS = 16, 2**30  # tags of messages inside a collective; smaller ones have other uses
OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MEAN: dist.ReduceOp.SUM,  # then divided: not every group has a mean
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}
MEAN: Any = dist.ReduceOp.AVG
NATIVE_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64
)  # fmt: skip


def has_all_reduce(kind: str, flat: Tensor, op: ReduceOp, world_size: int) -> bool:
    """Whether a group of that kind reduces `flat` itself, and not slower than an exchange between all ranks.

    Gloo does so in a ring, whose 2 (n - 1) steps wait for each other; of a small tensor an exchange has one or two.
    """
    if flat.dtype not in NATIVE_DTYPES or ("nccl" in kind and op in BITWISE):
        return False
    return kind != "gloo" or not is_small(flat.nbytes, world_size)


def native_op(op: ReduceOp, world_size: int, *, on_cuda: bool) -> Any:
    """torch's operation for `op`; for a mean it is the sum, to be divided, where NCCL's own mean has other bits.

    NCCL multiplies by 1 / n and adds, which gives the bits of a sum that is divided where n is a power of two, the sum
    does not overflow, and no part becomes smaller than the smallest normal number.
    """
    is_own_mean = on_cuda and op is ReduceOp.MEAN and world_size & (world_size - 1) == 0
    return MEAN if is_own_mean else OPS[op]


def all_reduce_options(op: Any) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


@functools.cache
def launched_all_reduce_options(op: Any) -> Any:
    """Those of a launched all-reduce: to make them takes longer than to launch it."""
    return on_current_stream(all_reduce_options(op))


def on_current_stream(options: Any) -> Any:
    """`options` of an operation that runs on the current stream, as far as this torch can do that.

    An older torch has no such option for most operations. It runs them on a stream of its own and returns their work.
    """
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def all_to_all_options() -> Any:
    return dist.AllToAllOptions()


def all_gather_options() -> Any:
    return dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]


def is_raw_on_cuda(tensor: Tensor) -> bool:
    """Whether the bytes of `tensor` lie side by side on a GPU and are its values."""
    return tensor.is_cuda and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return flatten(tensor, None).view(torch.uint8)


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """The flat tensor whose equal parts, in order, are `parts`, if there is one."""
    first, length = parts[0], parts[0].numel()
    if any(part.data_ptr() != first.data_ptr() + index * first.nbytes for index, part in enumerate(parts)):
        return None
    storage = first.untyped_storage()
    if any(part.untyped_storage().data_ptr() != storage.data_ptr() for part in parts):
        return None
    return first.as_strided((length * len(parts),), (1,))


def start(group: Any, device: torch.device | None, sends: Pairs, recvs: Pairs, *, by_size: bool = False) -> Any:
    """Start all messages and return their works; on a GPU, `device`, as one, or they would wait for each other.

    If `by_size`, messages of different sizes never meet: Gloo would abort the process that gets more than it expects.
    """
    if device is None:
        works = [group.recv([out.view(torch.uint8)], src, _tag(out, by_size)) for out, src in recvs]
        return works + [group.send([tensor.view(torch.uint8)], dst, _tag(tensor, by_size)) for tensor, dst in sends]
    # A group of torch.distributed asks for the device; a bare backend has one.
    of_device = [device] if isinstance(group, dist.ProcessGroup) else []
    group._start_coalescing(*of_device)
    for out, src in recvs:
        group.recv([out.view(torch.uint8)], src, 0)
    for tensor, dst in sends:
        group.send([tensor.view(torch.uint8)], dst, 0)
    return group._end_coalescing(*of_device)


def _tag(tensor: Tensor, by_size: bool) -> int:
    return FIRST_SIZE_TAG + tensor.nbytes % MAX_SIZE_TAGS if by_size else 0


def stream(
    group: Any, wait: Callable[[Any], None], outgoing: Tensor, dst: int, incoming: Tensor, src: int
) -> Iterator[tuple[int, int]]:
    """Exchange flat tensors in parts; yield the bounds of each as soon as `wait` for it returns."""
    step = max(1, PART_BYTES // outgoing.element_size())
    parts = [(start, min(start + step, incoming.numel())) for start in range(0, incoming.numel(), step)]
    receives = [group.recv([incoming[start:stop].view(torch.uint8)], src, 0) for start, stop in parts]
    sends = [
        group.send([outgoing[start : start + step].view(torch.uint8)], dst, 0)
        for start in range(0, outgoing.numel(), step)
    ]
    for work, bounds in zip(receives, parts, strict=True):
        wait(work)
        yield bounds
    for work in sends:
        wait(work)


def await_work(work: Any, deadline: Deadline) -> None:
    work.wait(timedelta(seconds=deadline.left() or 0.001))


def close_connections(group: Any, peers: Sequence[int]) -> None:
    """End what waits in a Gloo group: its abort does nothing, but a receive that times out closes its connections."""
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            group.recv([nothing], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))
