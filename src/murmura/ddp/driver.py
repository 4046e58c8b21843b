"""Drives the rounds of one model: from torch's hooks to the algorithm's, and back before backward returns.

A round opens at its first training forward and closes at the end of the first backward outside `no_sync`, or when it is
synchronised by hand. Everything here runs in the user's thread.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from murmura.algorithms import Algorithm, AlgorithmImpl
from murmura.algorithms.succession import succeed
from murmura.buckets import Bucket, ParameterSpec, bucket_limit, plan_buckets
from murmura.ddp import agreement, hooks, steps
from murmura.ddp.flattening import broadcast_together
from murmura.ddp.joining import Joining
from murmura.ddp.replica import ModelReplica
from murmura.ddp.rounds import GradientRounds, first_nonfinite, weigh
from murmura.errors import ConfigError, NonFiniteGradient, UsageError
from murmura.observe.observer import Observer, exposed
from murmura.observe.recorder import Probe
from murmura.types import Exchanges, NonFinite

log = logging.getLogger("murmura")


class Driver:
    """See the module's docstring. `close` removes every hook."""

    def __init__(
        self,
        module: nn.Module,
        replica: ModelReplica,
        algorithm: Algorithm,
        *,
        bucket_bytes: int,
        broadcasts_buffers: bool,
        verify_every: int,
        nonfinite: NonFinite,
    ) -> None:
        self.replica = replica
        self.channel = replica.transport
        self.joining = Joining(self.channel, module)
        self._bucket_bytes = bucket_bytes
        self._broadcasts_buffers = broadcasts_buffers and bool(replica.buffers)
        self._verify_every = verify_every
        self._nonfinite = nonfinite
        self._observer: Observer | None = None
        self._closed = False
        self._open = False  # a round has begun
        self._held_back = False  # a backward inside no_sync waits for its round
        self._syncing = True  # False inside no_sync
        self._stepping: Optimizer | None = None  # the optimizer whose step is under way
        self._came = False  # the backward under way has left a gradient in a parameter
        self._armed: Callable[[], object] = _nothing  # what the backward under way will call at its end, if it lives
        self._observed: list[int] | None = None  # parameters in the order of their gradients in the first round
        self._is_ordered = False  # whether that order has been taken over
        self._planned: list[int] = []
        self._parameter_hooks: dict[int, Any] = {}
        self.algorithm = algorithm.reify(self.channel)  # may refuse, so it comes before the hooks
        if verify_every and self._exchanges_weights:
            raise ConfigError(
                f"verify_every={verify_every} would find replicas that differ, as {type(algorithm).__name__} lets them "
                "do. Leave it out, and look at ddp.consensus_distance()."
            )
        self._rounds = GradientRounds(f"{self.channel.name}-rank{self.channel.rank}", self.channel.world_size)
        self._rounds.close_with(self)
        self._planned = list(reversed(replica.trainable()))
        self._module_hooks: list[Any] = []
        try:
            self._hook_parameters()
            self._revise_plan()
            self._module_hooks = hooks.hook_module(self, module)
            steps.listen(self, replica.parameters)
            self._start(self.algorithm)
        except BaseException:
            self.close()
            raise

    # The algorithm

    def _start(self, algorithm: AlgorithmImpl) -> None:
        """Run `algorithm` from the next round on."""
        self.algorithm = algorithm
        self._rounds.exchange = algorithm.on_bucket_ready
        self._taken_in = set(self.replica.trainable())
        algorithm.setup(self.replica)

    def switch(self, algorithm: Algorithm) -> None:
        """Close the running algorithm and start another, between rounds."""
        self._refuse_unfinished("set_algorithm()")
        if self._open or self._held_back:
            raise UsageError(
                "set_algorithm() was called inside a round: a forward has begun one, or no_sync() holds gradients "
                "back. Call it between optimizer.step() and the next forward."
            )
        self.algorithm = succeed(self.algorithm, algorithm, self.replica)
        self._take_in_thawed()
        self._revise_plan()
        self._start(self.algorithm)

    def settle(self) -> None:
        """Let the algorithm do what waits for a step that was skipped; nothing inside a round."""
        if not self._open:
            self.algorithm.settle()

    @property
    def _exchanges_gradients(self) -> bool:
        algorithm = self.algorithm
        alone = self.channel.world_size == 1 and not algorithm.works_alone
        return algorithm.exchanges is Exchanges.GRADIENTS and not alone

    @property
    def _exchanges_weights(self) -> bool:
        return self.algorithm.exchanges is Exchanges.WEIGHTS

    # Plans

    def _plan(self, order: list[int]) -> None:
        """Cut the parameters, in the expected `order` of their gradients, into new buckets."""
        replica = self.replica
        specs = [
            ParameterSpec(name, p.numel(), p.dtype, p.device)
            for name, p in zip(replica.names, replica.parameters, strict=True)
        ]
        limit = bucket_limit([specs[each] for each in order], self._bucket_bytes)
        replica.buckets = [
            Bucket(
                index,
                [replica.names[each] for each in members],
                [replica.parameters[each] for each in members],
                self.channel.allocate,
            )
            for index, members in enumerate(plan_buckets(specs, order, limit))
        ]
        self._rounds.use(replica.buckets)
        self._planned = order

    def _revise_plan(self) -> None:
        """Plan, or plan anew once from the order that rank 0 observed; without gradients to exchange, no buckets."""
        replica = self.replica
        if not self._exchanges_gradients:
            replica.buckets = []
            self._rounds.use([])
        elif not replica.buckets:
            self._plan(self._planned)
        elif self._observed is not None and not self._is_ordered:
            self._is_ordered = True
            rest = [index for index in self._planned if index not in set(self._observed)]
            order = torch.tensor([*self._observed, *rest])
            self.channel.broadcast(order, 0)
            if order.tolist() != self._planned:
                self._plan(order.tolist())

    def _take_in_thawed(self) -> None:
        """Give parameters that were frozen until now their place in a new plan, the same on every rank."""
        replica = self.replica
        thawed = [index for index in replica.trainable() if index not in self._parameter_hooks]
        if thawed:
            agreement.check_same_model(self.channel, [replica.names[index] for index in thawed])
            self._planned = sorted({*self._planned, *thawed}, reverse=True)
            self._hook_parameters()
            replica.buckets = []

    def _refuse_thawed(self) -> None:
        thawed = [index for index in self.replica.trainable() if index not in self._taken_in]
        if thawed:
            raise UsageError(
                f"parameter {self.replica.names[thawed[0]]!r} was frozen when the running algorithm started, so its "
                "weights are not exchanged. After unfreezing, start it anew with ddp.set_algorithm(...) on every rank."
            )

    def _hook_parameters(self) -> None:
        for index in self._planned:
            if index not in self._parameter_hooks:
                self._parameter_hooks[index] = hooks.hook_parameter(self, self.replica.parameters[index])

    @property
    def plan(self) -> dict[str, Any]:
        """What another run needs to cut the same buckets, in this round and the next."""
        names = self.replica.names
        return {
            "order": [names[index] for index in self._planned],
            "observed": None if self._observed is None else [names[index] for index in self._observed],
            "is_ordered": self._is_ordered,
        }

    def adopt_plan(self, plan: Mapping[str, Any]) -> None:
        """Cut the buckets as a run did that this one resumes."""
        place = {name: index for index, name in enumerate(self.replica.names)}
        order = [place.get(name, -1) for name in plan["order"]]
        if sorted(order) != sorted(self._planned):
            raise ConfigError(
                "this state was saved with other parameters trainable than are here. Freeze the same ones before "
                "you load it."
            )
        self._observed = None if plan["observed"] is None else [place[name] for name in plan["observed"]]
        self._is_ordered = plan["is_ordered"]
        if order != self._planned:
            self._planned, self.replica.buckets = order, []
            self._revise_plan()

    # Hooks

    def before_forward(self) -> None:
        """A training forward begins; the first of a round opens it."""
        if self._armed() is not None:
            return  # a checkpoint computes again what the backward under way needs
        self._refuse_unfinished("forward")
        if self._open:
            return
        if self._observer is not None:
            self._observer.round_opens(self.replica.round)
        with exposed(self._observer, "open_round"):
            self._open_round()

    def _open_round(self) -> None:
        replica = self.replica
        if not self.joining.active:
            self.joining.round_ended()  # of a batch that a loop was left with
        self.algorithm.settle()
        self.algorithm.before_forward()
        if self._exchanges_weights:
            self._refuse_thawed()
        else:
            self._take_in_thawed()
        self._revise_plan()
        if not self._exchanges_weights:
            if self._verify_every and replica.round and replica.round % self._verify_every == 0:
                self.verify()
            if self._broadcasts_buffers:
                broadcast_together(self.channel, replica.buffers, 0)
        self._open = True

    def output_reached(self) -> None:
        """Backward has reached an output of the module: from here it can be seen to its end."""
        self._arm()

    def gradient_came(self, parameter: nn.Parameter) -> None:
        """The gradient of `parameter` has been accumulated."""
        if not self._syncing:
            self._held_back = True
            return
        self._arm()
        self._came = True
        if self._exchanges_gradients:
            self._rounds.gradient_came(parameter, self.joining.weight, self.replica.round)

    def _arm(self) -> None:
        if self._syncing and self._armed() is None:
            reference = weakref.ref(self)

            def end() -> None:
                driver = reference()
                if driver is not None:
                    driver._end_of_backward()

            self._armed = weakref.ref(end)  # a backward that raises drops its callbacks
            self._came = False
            hooks.at_end_of_backward(end)

    def _end_of_backward(self) -> None:
        self._armed = _nothing
        # torch.autograd.grad passes the outputs too, but leaves no gradient in a parameter: that is no round.
        if self._syncing and self._came:
            self._finish()

    def before_step(self, optimizer: Optimizer) -> None:
        self.replica.remember(optimizer)
        if self._observer is not None:
            self._observer.before_step(self.replica.parameters)
        with exposed(self._observer, "before_step"):
            self.algorithm.before_step(optimizer)
        self._stepping = optimizer

    def after_step(self, optimizer: Optimizer) -> None:
        self._stepping = None
        with exposed(self._observer, "after_step"):
            self.algorithm.after_step(optimizer)
        if self._observer is not None:
            self._observer.stepped()

    # Rounds

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def sync(self, *, one_by_one: bool) -> None:
        """Run the round that `no_sync` held back; nothing to do when the round is in sync."""
        if not self._syncing:
            raise UsageError("gradients cannot be synchronised inside no_sync(); call it after the block.")
        if self._held_back or self._open:
            self._finish(one_by_one=one_by_one)

    def _finish(self, *, one_by_one: bool = False) -> None:
        with exposed(self._observer, "finish_round"):
            self._finish_round(one_by_one)

    def _finish_round(self, one_by_one: bool) -> None:
        replica = self.replica
        if self._exchanges_weights and not self._open:  # of a module in eval mode, whose forwards open no round
            self.algorithm.settle()
            self.algorithm.before_forward()
        if self._exchanges_gradients:
            if self._observed is None:
                position = {id(parameter): index for index, parameter in enumerate(replica.parameters)}
                self._observed = [position[id(parameter)] for parameter in self._rounds.observed]
            weight, weighs = self.joining.weight, self.joining.weighs
            self._rounds.finish(weight, replica.round, one_by_one=one_by_one, read_tails=weighs)
            if weighs and self.algorithm.averages:
                weigh(replica.buckets)
        self.joining.round_ended()
        self.algorithm.after_backward()
        replica.round += 1
        self._open = self._held_back = False
        if self._stepping is not None:  # the round of a closure, which the optimizer calls inside its step
            self.algorithm.before_step(self._stepping)
        if self._nonfinite is not NonFinite.PASS:
            self._check_finite(replica.round - 1)

    def _check_finite(self, number: int) -> None:
        name = first_nonfinite(self.replica.names, self.replica.parameters)
        if name is None:
            return
        if self._nonfinite is NonFinite.RAISE:
            raise NonFiniteGradient(
                f"rank {self.channel.rank}: the gradient of {name!r} holds an infinity or a NaN in round {number}. "
                "Lower the learning rate, clip, or look at the batch; with nonfinite='skip_step' such steps are left "
                "out."
            )
        log.warning("round %d is skipped: the gradient of %r is not finite", number, name)
        for parameter in self.replica.parameters:
            parameter.grad = None

    def verify(self) -> None:
        """Raise `ReplicaDivergence` unless all ranks hold the same parameters."""
        self.replica.check_same_parameters()
        agreement.check_same_values(self.channel, self.replica.names, self.replica.parameters)

    def _refuse_unfinished(self, what: str) -> None:
        if self._rounds.under_way:
            raise UsageError(
                f"{what} was called while the round of an earlier backward is unfinished: that backward raised, or is "
                "still running. Other ranks may be waiting for its gradients, so the world cannot go on: start it anew."
            )

    def observe(self, observer: Observer | None) -> None:
        """Report to `observer` from now on; None ends it."""
        if observer is not None and self._observer is not None:
            raise UsageError("this DDP is already observed. End the other Observer first, or give that one more sinks.")
        self._observer = self._rounds.observer = observer
        self.channel.observe(None if observer is None else Probe(observer.recorder, range(self.channel.world_size)))

    def close(self) -> None:
        """Remove the hooks and end the communication thread; may be called again."""
        if self._closed:
            return
        self._closed = True
        for handle in [*self._module_hooks, *self._parameter_hooks.values()]:
            handle.remove()
        steps.stop_listening(self.replica.parameters)
        self.algorithm.close()
        self.channel.close()
        self._rounds.close()


def _nothing() -> None:
    """What stands for a reference to nothing."""
