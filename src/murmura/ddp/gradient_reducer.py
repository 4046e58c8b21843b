"""Fills the buckets with the gradients of a round, and exchanges full buckets while backward is running.

Buckets go to the communication thread, or stream, in index order on every rank, in whatever order gradients come. The
gradient hooks copy gradients into buckets, or leave that to the communication thread where a core is idle. Where none
is spare, buckets are exchanged after backward. `finish` fills buckets with zeros for parameters that got no gradient,
exchanges the round's tail, waits for everything, and assigns gradients to parameters that only other ranks used.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from murmura.algorithms import AlgorithmImpl
from murmura.algorithms.background_exchange import BackgroundExchanges, PendingExchange, wait_for
from murmura.buckets import Bucket
from murmura.buckets.flat import plain_memory
from murmura.ddp.bucket_planner import BucketPlanner
from murmura.ddp.comm_hook import CommHook
from murmura.ddp.replica import ModelReplica
from murmura.ddp.tail import DataShares, Tail
from murmura.errors import MurmuraError, UsageError
from murmura.observe.observer import Observer, exchanging
from murmura.transports.cuda_streams import current_stream
from murmura.transports.host import has_idle_core, members_of

log = logging.getLogger("murmura")

_NOTHING = contextlib.nullcontext()
NUM_OUTSIDE = 2  # how many buckets' gradients may wait outside them, which takes as much memory again


class GradientReducer:
    """The gradients of one model on one rank."""

    def __init__(
        self, replica: ModelReplica, planner: BucketPlanner, algorithm: AlgorithmImpl, *, as_views: bool
    ) -> None:
        self._algorithm = algorithm
        self.hook: CommHook | None = None  # exchanges the buckets instead of the algorithm
        self._as_views = as_views  # gradients are views of the buckets, and not copied out of them
        self._has_graphs = False  # some came with a graph of their own, and so in their own memory
        self._replica = replica
        self._planner = planner
        self.observer: Observer | None = None
        self.observed: dict[int, nn.Parameter] = {}  # by id, in the order their gradients came in the first round
        self._transport = replica.transport
        self._num_ranks_here = len(members_of(self._transport.hosts, self._transport.rank))
        self._background = BackgroundExchanges(replica.transport)
        self._before: list[Tensor] | None = None  # gradients of earlier rounds, once asked for
        self._tail: Tail | None = None
        self._use([])

    def serve(self, algorithm: AlgorithmImpl) -> None:
        """Let `algorithm` exchange the buckets from the next round on."""
        self._algorithm = algorithm

    def plan(self, *, wanted: bool) -> None:
        """Make buckets if they are `wanted` and there are none; drop them if they are not."""
        if wanted != bool(self.buckets):
            self._use(self._planner.buckets() if wanted else [])

    def replan(self, algorithm: AlgorithmImpl | None = None) -> None:
        """Make new buckets by the present plan, if there are any.

        Collective if there is an `algorithm`: what it keeps for each element moves along.
        """
        if self.buckets:
            buckets = self._planner.buckets()
            if algorithm is not None:
                algorithm.before_replan(buckets)
            self._use(buckets)

    def load_plan(self, state: Mapping[str, Any]) -> None:
        """Make the buckets that the saved run had."""
        self._planner.load_state_dict(state)
        self.replan()

    def check_last_round(self) -> None:
        """Raise `CollectiveMismatch` if the last round met another one on other ranks, and nobody has looked yet."""
        if self._tail is not None:
            self._tail.check_unread()

    def _use(self, buckets: list[Bucket]) -> None:
        """Take other buckets, between two rounds; gradients that exist move into them."""
        self.check_last_round()
        self.buckets = self._replica.buckets = buckets
        self._where = {
            id(parameter): (bucket, slot) for bucket in self.buckets for slot, parameter in enumerate(bucket.parameters)
        }
        self._on_cpu = all(bucket.flat.is_cpu for bucket in self.buckets)
        self._tail = Tail(self.buckets, self._transport) if self.buckets else None
        if self._as_views:
            for bucket in self.buckets:
                for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                    if parameter.grad is not None and not parameter.grad.requires_grad:
                        view.copy_(parameter.grad)
                        parameter.grad = view
        self.reset()

    def reset(self) -> None:
        """Forget the round under way; nothing of it may be in flight."""
        self._ready = [[False] * len(bucket.parameters) for bucket in self.buckets]
        self._num_missing = [len(bucket.parameters) for bucket in self.buckets]
        self._outside: list[dict[int, Tensor]] = [{} for _ in self.buckets]  # by slot, still to be copied
        self._tickets: list[PendingExchange] = []
        # By GPU and address, those on which gradients of the round have come; default streams have one address.
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}
        self._failure: BaseException | None = None  # of the first exchange of the round that failed
        self._before = None
        self._weight: float | None = None  # of the round, where it comes before the exchange
        self.observed = {}
        self._observes = not self._planner.is_observed
        # Decided once a round, for the next one: it takes a system call.
        self._in_background = not self._on_cpu or self._transport.has_spare_core()
        self._copies_beside = self._in_background and self._has_core_for_copies()

    def _has_core_for_copies(self) -> bool:
        """Whether the communication thread can copy gradients without taking a core from backward.

        Where torch has several threads, they copy faster, and that thread would get a second set of them.
        """
        return torch.get_num_threads() == 1 and has_idle_core(self._num_ranks_here)

    def use_hook(self, hook: CommHook) -> None:
        """Let `hook` exchange the buckets from the next round on."""
        self.hook = hook
        self._planner.allocate = plain_memory  # no transport touches it, and some of torch's hooks resize it
        self.replan()

    def refuse_switch(self) -> None:
        """Raise `UsageError` if a hook is registered: it would go on exchanging the gradients."""
        if self.hook is not None:
            raise UsageError(
                "set_algorithm() was called, but a communication hook exchanges the gradients. Wrap the model again "
                "for another algorithm: DDP(ddp.into_inner(), ...)."
            )

    @property
    def has_sent(self) -> bool:
        """Whether buckets of the round under way have been sent."""
        return bool(self._tickets)

    def keep_earlier_gradients(self) -> None:
        """Copy the gradients that earlier rounds left, so that only this round's share is weighted by data."""
        if self._before is not None:
            return
        self._before = []
        if any(each.grad is not None for bucket in self.buckets for each in bucket.parameters):
            self._before = [torch.zeros_like(bucket.flat) for bucket in self.buckets]
            for bucket, before in zip(self.buckets, self._before, strict=True):
                for parameter, view in zip(bucket.parameters, bucket.views_of(before), strict=True):
                    if parameter.grad is not None:
                        view.copy_(parameter.grad.detach())

    def add(self, parameter: nn.Parameter, number: int, *, is_final: bool = True, send: bool = True) -> None:
        """Copy a new gradient of round `number` into its bucket, and if `send`, send the buckets that are full.

        One that is not `is_final`, because a hook may still change it, is left to `finish`.
        """
        place = self._where.get(id(parameter))
        if place is None:  # thawed: it takes part when the round has begun
            return
        bucket, slot = place
        index, gpu = bucket.index, bucket.gpu
        if index < len(self._tickets):
            raise UsageError(
                f"parameter {bucket.names[slot]!r} got a second gradient in one backward, after the first had been "
                "exchanged. Does a checkpointed block run twice? Use checkpoint(..., use_reentrant=False); or "
                "accumulate inside ddp.no_sync() and call ddp.sync_gradients() after the last backward."
            )
        if gpu is not None:  # all of them are copied when the bucket is full, after the streams that they came on
            key = gpu, torch._C._cuda_getCurrentRawStream(gpu)  # a Stream object would cost as much as the rest
            if key not in self._streams:
                self._streams[key] = current_stream(gpu)
        if self._observes:
            self.observed.setdefault(id(parameter), parameter)
        if not is_final:
            return
        if gpu is None:
            self._take(bucket, slot)
        ready = self._ready[index]
        if not ready[slot]:
            ready[slot] = True
            self._num_missing[index] -= 1
        if send and self._num_missing[index] == 0 and self._in_background:
            for full in self.buckets[len(self._tickets) :]:
                if self._num_missing[full.index]:
                    break
                self._send(full, number)

    def weigh(self, shares: DataShares) -> None:
        """Weight the gradients of the buckets that follow by the shares of data, if the algorithm wants that."""
        weighs_first = self.hook is None and self._algorithm.averages and self._algorithm.weighs_first
        self._weight = shares.mean if shares.weighs and weighs_first else None

    def finish(self, number: int, shares: DataShares, *, one_by_one: bool = False) -> None:
        """End round `number`: send what has not been sent, wait for all of it, and assign the gradients.

        Where the algorithm averages, means over the ranks become means over the data, of which they have `shares`.
        """
        assert self._tail is not None
        self.weigh(shares)
        for bucket in self.buckets[len(self._tickets) :]:
            for slot, parameter in enumerate(bucket.parameters):
                if self._ready[bucket.index][slot]:
                    continue
                # A gradient from before counts even if the last micro-batch did not use the parameter, or it is frozen.
                if parameter.grad is not None:
                    if bucket.gpu is None:
                        self._take(bucket, slot)
                    self._ready[bucket.index][slot] = True
                else:
                    bucket.views[slot].zero_()
            self._send(bucket, number)
            if one_by_one:
                self._tickets[-1].wait()
        tail = self._tail
        tail.write([used for ready in self._ready for used in ready], shares.own, number)
        self._tickets.append(self._submit(f"the tail of round {number}", tail.exchange, tail.values))
        wait_for(self._tickets)
        if tail.must_be_read(shares.weighs):
            self._settle(tail, self._algorithm.averages and shares.weighs and self._weight is None, number)
        if not self._as_views or self._has_graphs:
            self._copy_out()
        else:
            self._check_views()
        self.reset()

    def _gather(self, bucket: Bucket) -> None:
        """Copy all gradients of `bucket`, which are on a GPU, into it, after the streams that they came on."""
        assert bucket.gpu is not None
        current = current_stream(bucket.gpu)
        ready = [slot for slot, is_ready in enumerate(self._ready[bucket.index]) if is_ready]
        outside = {slot: gradient for slot in ready if (gradient := bucket.gradient_outside(slot)) is not None}
        for stream in self._streams.values():
            if stream != current:
                current.wait_stream(stream)
                for gradient in outside.values():  # its memory must outlive the copy, on whichever stream it was made
                    gradient.record_stream(current)
        self._copy_in(bucket, outside)

    def _take(self, bucket: Bucket, slot: int) -> None:
        """Have a gradient, which is on the CPU, copied into its bucket, here or by the thread that exchanges it."""
        gradient = bucket.gradient_outside(slot)
        if gradient is None:
            return
        if self._copies_beside and self.hook is None and self._would_copy_in_time(bucket):
            self._outside[bucket.index][slot] = gradient
        else:
            self._copy_in(bucket, {slot: gradient})

    def _would_copy_in_time(self, bucket: Bucket) -> bool:
        """Whether the communication thread does not lag behind, so that the gradients of `bucket` wait for it."""
        earlier = bucket.index - NUM_OUTSIDE
        return earlier < 0 or (earlier < len(self._tickets) and self._tickets[earlier].done())

    def _copy_in(self, bucket: Bucket, gradients: Mapping[int, Tensor]) -> None:
        has_graph = bucket.copy_in(gradients, as_views=self._as_views)
        if has_graph and not self._has_graphs:
            log.warning("backward(create_graph=True): gradients are averaged, but not through their graphs")
        if has_graph:  # two threads come here: whoever finds none must not write what it read before
            self._has_graphs = True

    def _copy_out(self) -> None:
        """Copy the means from the buckets into gradients of their own memory."""
        for bucket in self.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not view and parameter.grad is not None:
                    with torch.no_grad():
                        parameter.grad.copy_(view)
                elif parameter.grad is view and not self._as_views:  # only other ranks used it
                    parameter.grad = view.clone()

    def _check_views(self) -> None:
        """Raise `UsageError` if a gradient is no longer that which was exchanged: its mean would be lost."""
        for bucket, ready in zip(self.buckets, self._ready, strict=True):
            if bucket.holds_all():
                continue
            for slot, parameter in enumerate(bucket.parameters):
                if not ready[slot] or bucket.holds(slot):
                    continue
                if parameter.grad is None or bucket.gradient_outside(slot) is not None:
                    raise UsageError(
                        f"the gradient of {bucket.names[slot]!r} was replaced or removed after it had been sent, while "
                        "backward was running. Change a gradient in a hook of its own parameter "
                        "(register_post_accumulate_grad_hook), or after backward()."
                    )

    def _send(self, bucket: Bucket, number: int) -> None:
        if bucket.gpu is not None:
            self._gather(bucket)
        outside = self._outside[bucket.index]
        what = f"bucket {bucket.index} (first parameter {bucket.names[0]!r}) of round {number}"
        is_last = bucket.index == len(self.buckets) - 1
        finish = self.hook.start(bucket, is_last=is_last) if self.hook is not None else None
        weight = self._weight

        def exchange() -> None:
            if outside:
                self._copy_in(bucket, outside)
                outside.clear()  # their memory is free for the rest of backward
            if weight is not None:
                self._divide(bucket, weight)
            with exchanging(self.observer, "bucket", bucket.index):
                if finish is not None:
                    finish()
                    return
                with without_autocast(bucket.flat.device.type):
                    self._algorithm.on_bucket_ready(bucket)

        self._tickets.append(self._submit(what, exchange, bucket.flat))

    def _submit(self, what: str, exchange: Callable[[], None], tensor: Tensor) -> PendingExchange:
        def run() -> None:
            if self._failure is not None:  # to the peers a later exchange would look like the one that failed
                raise self._failure
            try:
                exchange()
            except BaseException as error:
                if isinstance(error, MurmuraError):
                    error.add_note(f"It was the exchange of {what}.")
                self._failure = error
                raise

        if self._in_background:
            return self._background.start(what, [tensor], run, "all_reduce")
        return PendingExchange(self._transport, self._transport.run_job(what, run))

    def _settle(self, tail: Tail, weighs: bool, number: int) -> None:
        """Give every parameter that any rank used its mean gradient; leave the others without."""
        contents = tail.read(number)
        shares, unused = iter(contents.used), []
        for bucket, ready in zip(self.buckets, self._ready, strict=True):
            for slot, parameter in enumerate(bucket.parameters):
                if next(shares) == 0:
                    unused.append(bucket.names[slot])
                elif not ready[slot]:
                    parameter.grad = bucket.views[slot]
        if unused and self.hook is None:
            self._algorithm.parameters_unused(unused)
        if weighs:
            for bucket in self.buckets:
                self._divide(bucket, contents.weight)

    def _divide(self, bucket: Bucket, weight: float) -> None:
        """Turn the mean over the ranks into the mean over the data: ranks without any bring zeros.

        What earlier rounds left in the bucket is a mean over the data already.
        """
        if weight in (0.0, 1.0):
            return
        if self._before:
            bucket.flat.sub_(self._before[bucket.index]).div_(weight).add_(self._before[bucket.index])
        else:
            bucket.flat.div_(weight)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Inside it operations on `device` run in the dtypes of their tensors.

    A backward that is called inside autocast runs inside it too, and so do exchanges in its thread; those in a
    communication thread do not.
    """
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING
