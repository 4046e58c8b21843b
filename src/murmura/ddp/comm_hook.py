"""Communication hooks as torch's DistributedDataParallel takes them: a function exchanges each bucket itself.

The hook runs in the thread of the backward, in bucket order on every rank, and returns a future. The communication
thread waits for it and puts its value into the bucket. DDP sends the round's tail itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from murmura.algorithms import AlgorithmImpl, GradientAllReduceAlgorithmImpl
from murmura.buckets import Bucket
from murmura.errors import ConfigError, PeerTimeout, UsageError
from murmura.transports.base import Transport

Hook = Callable[[Any, Any], Any]

_EQUIVALENTS = {
    "allreduce_hook": "GradientAllReduceAlgorithm()",
    "fp16_compress": "GradientAllReduceAlgorithm(compressor=Cast(torch.float16))",
    "bf16_compress": "GradientAllReduceAlgorithm(compressor=Cast(torch.bfloat16))",
    "quantization": "ByteGradAlgorithm()",
    "powerSGD": "PowerSGDAlgorithm()",
    "post_localSGD": "Phased(GradientAllReduceAlgorithm(), until_round=..., then=LocalSGDAlgorithm(...))",
}
_ANY_EQUIVALENT = "an Algorithm of your own (docs/algorithms.md)"


class GradBucket:
    """What a hook sees of a bucket: the interface of torch.distributed.GradBucket."""

    def __init__(self, bucket: Bucket, *, is_last: bool) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat
        self._is_last = is_last

    def index(self) -> int:
        """The place of this bucket in the order in which buckets are exchanged."""
        return self._bucket.index

    def buffer(self) -> Tensor:
        """The gradients side by side, in one dimension; a hook may write into it."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Let `buffer()` return another tensor of the same length; what counts is the value of the hook's future."""
        if buffer.numel() != self._bucket.flat.numel():
            raise UsageError(
                f"set_buffer() got {buffer.numel()} elements for bucket {self.index()}, which has "
                f"{self._bucket.flat.numel()}. Give a tensor as long as bucket.buffer()."
            )
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """`buffer()` cut by parameter, with the shapes of the parameters."""
        return self._bucket.views_of(self._buffer.view(-1))

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the bucket, in the order of `gradients()`."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the round."""
        return self._is_last


class CommHook:
    """A hook and its state, registered for one model."""

    def __init__(self, state: Any, hook: Hook, transport: Transport) -> None:
        self._state = state
        self._hook = hook
        self._transport = transport

    def start(self, bucket: Bucket, *, is_last: bool) -> Callable[[], None]:
        """Run the hook on `bucket`; what is returned waits for its future and takes over the value."""
        future = self._hook(self._state, GradBucket(bucket, is_last=is_last))
        if not isinstance(future, torch._C.Future):  # the base of torch.futures.Future, which works return
            raise UsageError(
                f"the communication hook {_name(self._hook)} returned {type(future).__name__}, not a "
                "torch.futures.Future. Return the future of the exchange, or one after future.set_result(tensor)."
            )

        def finish() -> None:
            self._store(self._value(future, bucket), bucket)

        return finish

    def _value(self, future: Any, bucket: Bucket) -> Any:
        if bucket.flat.is_cuda:
            return future.wait()  # orders the stream; torch's watchdog has the deadline
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        transport = self._transport
        if not done.wait(transport.timeout):
            rank = transport.world_ranks[transport.rank]
            raise PeerTimeout(
                f"rank {rank} waited {transport.timeout:.1f} s for the future of the communication hook "
                f"{_name(self._hook)} on bucket {bucket.index} (first parameter {bucket.names[0]!r}). Does the hook "
                "run on every rank, and do all of its exchanges end?",
                rank=rank,
                operation="communication hook",
            )
        return future.value()

    def _store(self, value: Any, bucket: Bucket) -> None:
        if isinstance(value, (list, tuple)) and len(value) == 1:  # what the future of an all-reduce holds
            value = value[0]
        if not isinstance(value, Tensor) or value.numel() != bucket.flat.numel():
            got = f"{value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"the future of the communication hook {_name(self._hook)} holds {got}, and bucket {bucket.index} has "
                f"{bucket.flat.numel()} elements. Let it hold one tensor as long as bucket.buffer()."
            )
        if value.data_ptr() != bucket.flat.data_ptr() or value.dtype is not bucket.flat.dtype:
            bucket.flat.copy_(value.reshape(-1))


def check_hook(hook: Any, algorithm: AlgorithmImpl, transport: Transport, group: Any) -> None:
    """Refuse a hook that this model cannot run."""
    if not callable(hook):
        raise ConfigError(f"hook={hook!r} cannot be called. Give a function of a state and a bucket.")
    is_plain = type(algorithm) is GradientAllReduceAlgorithmImpl and algorithm.compressor is None
    if not is_plain or not algorithm.averages or algorithm.hierarchical:  # type: ignore[attr-defined]
        raise UsageError(
            f"a communication hook takes the place of plain gradient all-reduce, and {type(algorithm).__name__} is "
            f"running. Leave algorithm= out, or instead of {_name(hook)} use algorithm={_equivalent(hook)}."
        )
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            f"{_name(hook)} exchanges through torch.distributed, which is not initialised here. Call "
            f"torch.distributed.init_process_group first, or use {_equivalent(hook)} instead."
        )
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if (size, rank) != (transport.world_size, transport.rank):
        raise UsageError(
            f"this is rank {transport.rank} of {transport.world_size} for DDP and rank {rank} of {size} for "
            f"torch.distributed, where {_name(hook)} would exchange gradients. Give DDP that group, with "
            f"process_group=, or use {_equivalent(hook)} instead."
        )


def torch_group(given: Any) -> Any:
    """The group of torch.distributed that was given, else its default group, else None."""
    is_there = given is None and dist.is_available() and dist.is_initialized()
    return dist.group.WORLD if is_there else given


def _name(hook: Any) -> str:
    return str(getattr(hook, "__name__", None) or type(hook).__name__)


def _equivalent(hook: Any) -> str:
    name = _name(hook)
    return next((ours for theirs, ours in _EQUIVALENTS.items() if theirs in name), _ANY_EQUIVALENT)
