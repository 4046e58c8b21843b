"""One round of gradients: they land in their buckets, full buckets leave in order, and come home before backward ends.

Gradient hooks only copy and enqueue. Buckets go to the communication thread in index order on every rank, whatever the
order in which gradients come; `finish` fills what no gradient came for, waits, and settles by the tails which
parameters count as used.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

from murmura.buckets import Bucket, Tail
from murmura.errors import CollectiveMismatch, MurmuraError, UsageError
from murmura.observe.observer import Observer, exchanging
from murmura.transports.order import Order, Ticket


class GradientRounds:
    """The gradients of one model on one rank; `exchange` is what the algorithm does with a full bucket."""

    def __init__(self, name: str, world_size: int) -> None:
        self.exchange: Callable[[Bucket], None]
        self.observer: Observer | None = None
        self.observed: list[nn.Parameter] = []  # in the order their gradients came, of the round under way
        self._order = Order(name)
        self._world_size = world_size
        self.use([])

    def use(self, buckets: Sequence[Bucket]) -> None:
        """Take other buckets, between two rounds; gradients that exist move into them."""
        self.buckets = list(buckets)
        self._where = {
            id(parameter): (bucket, slot) for bucket in self.buckets for slot, parameter in enumerate(bucket.parameters)
        }
        self._layout = zlib.crc32(";".join(",".join(bucket.names) for bucket in self.buckets).encode())
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                    parameter.grad = view
        self.reset()

    def reset(self) -> None:
        """Forget the round under way; nothing of it may be in flight."""
        self._ready = [[False] * len(bucket.parameters) for bucket in self.buckets]
        self._num_missing = [len(bucket.parameters) for bucket in self.buckets]
        self._tickets: list[Ticket] = []
        self.observed = []

    @property
    def under_way(self) -> bool:
        """Whether gradients of an unfinished round have come."""
        return bool(self._tickets) or any(any(ready) for ready in self._ready)

    def gradient_came(self, parameter: nn.Parameter, weight: float, number: int) -> None:
        """A gradient of round `number` is complete: bring it home, and send off what is full."""
        bucket, slot = self._where[id(parameter)]
        if bucket.index < len(self._tickets):
            raise UsageError(
                f"parameter {bucket.names[slot]!r} got a second gradient in one backward, after the first had been "
                "exchanged. Does a checkpointed block run twice? Use checkpoint(..., use_reentrant=False); or "
                "accumulate inside ddp.no_sync() and call ddp.sync_gradients() after the last backward."
            )
        self._bring_home(bucket, slot)
        if not self._ready[bucket.index][slot]:
            self._ready[bucket.index][slot] = True
            self._num_missing[bucket.index] -= 1
            self.observed.append(parameter)
        while len(self._tickets) < len(self.buckets) and self._num_missing[len(self._tickets)] == 0:
            self._send_off(self.buckets[len(self._tickets)], weight, number)

    def finish(self, weight: float, number: int, *, one_by_one: bool = False, read_tails: bool = True) -> None:
        """End round `number`: everything that is still here leaves, all comes home, and gradients are assigned."""
        for bucket in self.buckets[len(self._tickets) :]:
            for slot, parameter in enumerate(bucket.parameters):
                if self._ready[bucket.index][slot]:
                    continue
                # A gradient from before counts even if the last micro-batch did not use the parameter, or it is frozen.
                if parameter.grad is not None:
                    self._bring_home(bucket, slot)
                    self._ready[bucket.index][slot] = True
                else:
                    bucket.views[slot].zero_()
            self._send_off(bucket, weight, number)
            if one_by_one:
                self._tickets[-1].wait()
        for ticket in self._tickets:
            ticket.wait()
        for bucket in self.buckets:
            self._settle(bucket, number, read_tails)
        self.reset()

    def close(self) -> None:
        self._order.close()

    def close_with(self, owner: object) -> None:
        """Let the communication thread end when `owner` is gone, after what is queued."""
        self._order.close_with(owner)

    def _bring_home(self, bucket: Bucket, slot: int) -> None:
        parameter, view = bucket.parameters[slot], bucket.views[slot]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {bucket.names[slot]!r} is sparse, which DDP does not exchange. "
                "Build the embedding with sparse=False, or name the parameter in DDP(ignore=...)."
            )
        if gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
            if (gradient.dtype, gradient.device, gradient.shape) != (view.dtype, view.device, view.shape):
                raise UsageError(
                    f"the gradient of {bucket.names[slot]!r} no longer fits its bucket: the parameter was cast, moved "
                    "or resized after wrapping. Do that before, or wrap the model again: DDP(ddp.into_inner(), ...)."
                )
            if gradient.requires_grad:
                raise UsageError(
                    f"the gradient of {bucket.names[slot]!r} has a graph of its own, which no exchange can keep. "
                    "Instead of backward(create_graph=True) use torch.autograd.grad, and then a plain backward."
                )
            view.copy_(gradient)
            parameter.grad = view

    def _send_off(self, bucket: Bucket, weight: float, number: int) -> None:
        bucket.write_tail(self._ready[bucket.index], weight, self._fingerprint(bucket, number))
        stream = torch.cuda.current_stream(bucket.flat.device) if bucket.flat.is_cuda else None

        what = f"bucket {bucket.index} (first parameter {bucket.names[0]!r}) of round {number}"

        def exchange() -> None:
            try:
                with (
                    exchanging(self.observer, "bucket", bucket.index),
                    contextlib.nullcontext() if stream is None else torch.cuda.stream(stream),
                ):
                    self.exchange(bucket)
            except MurmuraError as error:
                error.add_note(f"It was the exchange of {what}.")
                raise

        self._tickets.append(self._order.submit(what, exchange))

    def _settle(self, bucket: Bucket, number: int, read_tails: bool) -> None:
        """Give every parameter that any rank used its mean gradient; leave the others without."""
        ready = self._ready[bucket.index]
        # Reading the tail makes the host wait for a GPU: there only if there is something to learn from it.
        if bucket.flat.is_cuda and all(ready) and not read_tails:
            return
        tail = bucket.read_tail()
        self._check_fingerprint(bucket, tail, number)
        for slot, (parameter, share) in enumerate(zip(bucket.parameters, tail.used, strict=True)):
            if share > 0 and not ready[slot]:
                parameter.grad = bucket.views[slot]

    def _fingerprint(self, bucket: Bucket, number: int) -> float:
        # Whole numbers so small that even their sum over the ranks is exact in the dtype of the bucket.
        largest_exact = int(2 / torch.finfo(bucket.flat.dtype).eps)
        return float((self._layout + number) % max(1, largest_exact // self._world_size))

    def _check_fingerprint(self, bucket: Bucket, tail: Tail, number: int) -> None:
        if tail.fingerprint != self._fingerprint(bucket, number):
            raise CollectiveMismatch(
                f"in round {number}, bucket {bucket.index} (first parameter {bucket.names[0]!r}) met other ranks' "
                "buckets of another round or layout. Every rank must run the same number of backwards outside "
                "no_sync(), on the same model."
            )


def weigh(buckets: Sequence[Bucket]) -> None:
    """Turn the plain mean into the mean over the data: ranks without any brought zeros."""
    for bucket in buckets:
        weight = bucket.read_tail().weight
        if weight not in (0.0, 1.0):
            bucket.gradients.div_(weight)


def first_nonfinite(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> str | None:
    """The name of the first parameter whose gradient holds an infinity or a NaN."""
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return name
    return None
