"""Drives the rounds of one model: torch's hooks are events of its `Round`, and lead to the hooks of its algorithm.

A round begins at its first training forward, or, without one (eval mode, parts, methods), when its backward has run.
It ends when a synchronising backward ends, or by hand. Everything here runs in the user's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from murmura.algorithms import Algorithm, AlgorithmImpl
from murmura.algorithms.switching import average_moments, replace_algorithm
from murmura.ddp import hooks, optimizer_hooks, replica_checks
from murmura.ddp.backward_tracker import BackwardTracker
from murmura.ddp.bucket_planner import BucketPlanner
from murmura.ddp.gradient_reducer import GradientReducer
from murmura.ddp.join_context import Stage
from murmura.ddp.nonfinite import NonFinitePolicy
from murmura.ddp.replica import ModelReplica
from murmura.ddp.round import BACKWARDS, Event, Phase, Round
from murmura.ddp.settling import Settling
from murmura.ddp.step_tracker import StepTracker
from murmura.ddp.trained_parameters import TrainedParameters
from murmura.ddp.uneven_data import Joining
from murmura.ddp.wrapping import refuse_inside_torch_ddp
from murmura.errors import ConfigError, UsageError
from murmura.observe.observer import Observer, exposed
from murmura.observe.probe import Probe
from murmura.transports.base import Transport
from murmura.types import Exchanges, NonFinite


class RoundDriver:
    """Drives the rounds of `module`. `replica` has a channel of `world`."""

    def __init__(
        self,
        module: nn.Module,
        replica: ModelReplica,
        algorithm: Algorithm,
        *,
        world: Transport,
        owns_world: bool,
        bucket_bytes: Sequence[int],
        broadcasts_buffers: bool,
        verify_every: int,
        nonfinite: NonFinite,
        gradients_are_views: bool = True,
    ) -> None:
        self.module = module
        self.replica = replica
        self.channel = replica.transport
        self.round = Round()
        self.joining = Joining(self)
        self.needs_settling = False  # a round has ended since `_before_round`
        self.requires_buffers = True  # the next round begins with a broadcast of the buffers
        self._world, self._owns_world = world, owns_world
        self._broadcasts_buffers = broadcasts_buffers and bool(replica.buffers)
        self._verify_every = verify_every
        self._nonfinite = NonFinitePolicy(replica, nonfinite)
        self._observer: Observer | None = None
        self.backward = BackwardTracker(self._end_of_backward)
        self.settling = Settling(replica, self.round, self.backward)
        self._was_late = False  # the last round began with its backward
        self._collects = self._sends_early = False  # the gradients of the running backward; before it ends
        self._loading: nn.Module | None = None  # the outermost module that is loading
        self.reads_names = False  # the state of the module is read for its names only
        self._module_hooks: list[Any] = []
        self.algorithm = algorithm.reify(self.channel)  # may refuse, so it comes before the hooks
        if verify_every and self._exchanges_weights:
            raise ConfigError(
                f"verify_every={verify_every} would find replicas that differ, as {type(algorithm).__name__} lets them "
                "do. Leave it out, and look at ddp.consensus_distance()."
            )
        self._steps = StepTracker(replica)
        self.planner = BucketPlanner(replica, bucket_bytes)
        self.reducer = GradientReducer(replica, self.planner, self.algorithm, as_views=gradients_are_views)
        self._stop_listening = world.before_collectives(self.settling.before_collective)
        self.trained = TrainedParameters(self, replica, self.planner, self.reducer)
        try:
            self._module_hooks = hooks.hook_module(self, module)
            optimizer_hooks.listen(self, replica.parameters)
            self._start(self.algorithm)
        except BaseException:
            self.close(settle=False)
            raise

    # The algorithm

    def _start(self, algorithm: AlgorithmImpl) -> None:
        """Run `algorithm` from the next round on."""
        self.algorithm = self.settling.algorithm = algorithm
        self.reducer.plan(wanted=self._exchanges_gradients)
        self.reducer.serve(algorithm)
        algorithm.setup(self.replica)

    def switch(self, algorithm: Algorithm) -> None:
        """Close the running algorithm and start another, between rounds."""
        self._notice_exception()
        self.joining.uneven.refuse_switch()
        self.reducer.refuse_switch()
        self.round.apply(Event.SWITCH)
        self.settling.settle()
        replica_checks.check_same_algorithm(self.channel, algorithm)
        self.algorithm = replace_algorithm(self.algorithm, algorithm, self.replica)
        self.trained.start_anew()
        self._start(self.algorithm)

    @property
    def _exchanges_gradients(self) -> bool:
        has_work = self.channel.world_size > 1 or self.algorithm.works_alone or self.reducer.hook is not None
        return has_work and self.algorithm.exchanges is Exchanges.GRADIENTS

    @property
    def _exchanges_weights(self) -> bool:
        return self.algorithm.exchanges is Exchanges.WEIGHTS

    def remember(self, optimizer: Optimizer) -> None:
        """`optimizer` moves the parameters: its moments are averaged wherever those of the replicas must be equal."""
        if self.replica.remember(optimizer) and self.replica.moments_may_differ and not self._exchanges_weights:
            average_moments(self.replica, [optimizer], unless_equal=True)

    # Collective points

    def _before_round(self) -> None:
        """A forward follows, between two rounds: here weights may be written."""
        self._world.announce()  # the other models of this world settle too
        self.settling.settle()
        before = self.algorithm.innermost
        self.algorithm.before_round()
        if self.algorithm.innermost is not before:  # another phase
            self.trained.start_anew()
        self.needs_settling = False

    def settle_for_good(self) -> None:
        """As `settle`, before the state is read; refused where that would lose gradients."""
        self._notice_exception()
        if self.round.phase is Phase.ACCUMULATED and not self.replica.has_gradients():
            self.round.apply(Event.DISCARD)
        self.round.apply(Event.SAVE, "saving the state (algorithm_state_dict, Checkpointer.save)")
        self.settling.refuse_after_failure("saving the state")
        self.reducer.check_last_round()
        self.settling.settle()

    def before_save(self) -> None:
        """The state of the module is about to be read, to be saved as a rule."""
        if not self.reads_names:
            self.settling.refuse_after_failure("reading the state of the module", if_undefined=True)

    def before_load(self, module: nn.Module) -> None:
        """`module`, the root or a part, begins to load: what is pending belongs to the weights that are replaced."""
        if self._loading is None:
            self._loading = module
            self.settling.settle()

    def after_load(self, module: nn.Module) -> None:
        """Other weights are there: what the algorithm derived from the former ones is void; the round begins anew."""
        if self._loading is module:
            self._loading = None
            self.algorithm.weights_replaced()
            self.round.begun = False

    def after_state_load(self) -> None:
        """The algorithm has loaded its state, perhaps of another phase, with residuals by bucket."""
        self.reducer.plan(wanted=self._exchanges_gradients)  # before a skipped step or a thawed parameter is noticed
        self.needs_settling = True  # the step of its last round may have been skipped

    def take_over(self, root: int, *, whole: bool = True) -> None:
        """Take over the parameters of rank `root`, and the buffers unless they are each rank's own and not `whole`."""
        self.before_load(self.module)
        self.replica.take_over(root, buffers=whole or self._broadcasts_buffers)
        self.after_load(self.module)

    # Forward

    def before_forward(self, training: bool) -> None:
        """A forward of the root begins, with a graph; the first training forward begins a round."""
        refuse_inside_torch_ddp()
        self._notice_exception()
        if self.backward.recomputes:
            return
        self.settling.seen()
        self.round.check(Event.FORWARD)
        self.settling.refuse_after_failure("a forward")
        self.backward.forward()
        if self.round.is_idle:
            self._before_round()
        if training:
            self.round.apply(Event.FORWARD)
            if not self.round.begun:
                self.begin()

    def before_part(self) -> None:
        """A forward of a part begins, with a graph, and not within one of the root."""
        if self.round.is_idle and not self.backward.recomputes:
            self.settling.seen()
            self._before_round()

    def begin(self) -> None:
        """Do the work at the beginning of a round, before its first forward."""
        if self._observer is not None:
            self._observer.round_opens(self.replica.round)
        with exposed(self._observer, "begin_round"):
            self.joining.uneven.announce(Stage.BEGIN)
            self.joining.forget_broken_loop()
            self.trained.take_in_thawed(self.algorithm)
            self.reducer.plan(wanted=self._exchanges_gradients)
            self.algorithm.before_forward()
            if not self._exchanges_weights:
                self._verify_if_due()
                self.settling.buffers_pending = self._broadcasts_buffers and self.requires_buffers
                self.settling.broadcast_pending_buffers()
            self.requires_buffers = True
            self.round.begun = True

    def _begin_late(self) -> None:
        """Begin a round whose backward has run: here nothing may be written."""
        if self._observer is not None:
            self._observer.round_opens(self.replica.round)
        self.trained.take_in_thawed(self.algorithm)
        self.reducer.plan(wanted=self._exchanges_gradients)
        self.algorithm.before_forward()
        is_wanted = self._broadcasts_buffers and self.requires_buffers
        self.settling.buffers_pending = is_wanted and not self._exchanges_weights
        self.requires_buffers = True

    def _verify_if_due(self) -> None:
        is_due = self._verify_every and self.replica.round and self.replica.round % self._verify_every == 0
        if is_due and not self.joining.uneven.active:  # ranks out of data do no step
            self.verify()

    # Backward

    def output_reached(self) -> None:
        """Backward has reached an output of the root: from here it can be followed to its end."""
        self._notice_exception()
        if self.round.phase in (Phase.IDLE, Phase.OPEN):
            self.algorithm.before_backward()
        self.backward.follow(through_root=True)

    def gradient_came(self, parameter: nn.Parameter, *, is_final: bool) -> None:
        """The gradient of `parameter` has been accumulated; unless it `is_final`, hooks may still change it."""
        if parameter.grad is None:  # an undefined gradient is none
            return
        if self.round.phase not in BACKWARDS or not self.backward.is_running:
            self._first_gradient_came()
        if self._collects and self.round.phase is Phase.BACKWARD:
            self.reducer.add(parameter, self.replica.round, is_final=is_final, send=self._sends_early)

    def _first_gradient_came(self) -> None:
        """The first gradient of a backward has come."""
        self._notice_exception()
        self.backward.follow(through_root=False)
        if self.round.is_idle:
            self.joining.forget_broken_loop()
        if not self.backward.syncs:
            self.round.apply(Event.LOCAL_GRADIENT)
            return
        self.round.apply(Event.GRADIENT)
        self.joining.uneven.announce(Stage.EXCHANGE)
        self._collects = self._exchanges_gradients
        self.reducer.plan(wanted=self._collects)
        self.reducer.weigh(self.joining.shares)
        self._sends_early = self.round.begun or not self.trained.thawed()

    def gradients_begin(self) -> None:
        """The first gradient of a backward inside a join is about to be accumulated."""
        if self._exchanges_gradients:
            self.reducer.plan(wanted=self._exchanges_gradients)
            self.reducer.keep_earlier_gradients()

    def _notice_exception(self) -> None:
        """Notice that the last backward raised an exception: it has not ended, and is not running any more."""
        if self.round.phase in BACKWARDS and not self.backward.is_running:
            self.round.apply(Event.FAILURE if self.reducer.has_sent else Event.RAISED)
            self.reducer.reset()

    def _end_of_backward(self) -> None:
        self.backward.ended()
        if self.round.phase is Phase.LOCAL_BACKWARD:
            self.round.apply(Event.LOCAL_END)
        elif self.round.phase is Phase.BACKWARD:  # torch.autograd.grad leaves no gradient in a parameter
            self.finish(Event.END)

    def sync(self, *, one_by_one: bool) -> None:
        """Run the round that `no_sync` held back; nothing to do when the round is in sync."""
        if self.backward.in_no_sync:
            raise UsageError("gradients cannot be synchronised inside no_sync(); call it after the block.")
        self._notice_exception()
        self.round.check(Event.SYNC)
        if not self.round.is_idle:
            self.joining.uneven.announce(Stage.EXCHANGE)
            self.finish(Event.SYNC, one_by_one=one_by_one)

    def finish(self, event: Event, *, one_by_one: bool = False) -> None:
        """Exchange what the round exchanges, and end it."""
        late = not self.round.begun
        with exposed(self._observer, "finish_round"):
            try:
                if late:
                    self._begin_late()
                observed = list(self.reducer.observed.values())
                if self._exchanges_gradients:
                    self.reducer.finish(self.replica.round, self.joining.shares, one_by_one=one_by_one)
                self.joining.round_ended()
                self.algorithm.after_backward()
                if self._exchanges_gradients and self.planner.observe(observed):
                    self.reducer.replan(self.algorithm)
                if late and not self._exchanges_weights:
                    self._verify_if_due()
            except BaseException:
                self.round.apply(Event.FAILURE)
                raise
        self.replica.round += 1
        self.round.apply(event)
        self.round.begun = False
        self.needs_settling = True
        self._was_late = late
        self._steps.round_ended()
        self._nonfinite.round_ended(self.replica.round - 1)

    # Optimizer steps

    def before_step(self, optimizer: Optimizer) -> None:
        """`optimizer` begins its step."""
        self._notice_exception()
        self.backward.refuse_step()
        self.round.apply(Event.STEP)
        self.settling.refuse_after_failure("an optimizer's step")
        self.settling.seen()
        self.remember(optimizer)
        self._prepare_step(optimizer)

    def after_closure(self, optimizer: Optimizer) -> None:
        """The closure that `optimizer` calls inside its step has returned."""
        self._notice_exception()
        self._prepare_step(optimizer)

    def _prepare_step(self, optimizer: Optimizer) -> None:
        if self._observer is not None:
            self._observer.before_step(self.replica.parameters)
        with exposed(self._observer, "before_step"):
            if self._nonfinite.skips_step:
                self.algorithm.skip_step()
            self.algorithm.before_step(optimizer)
            if not self.algorithm.leaves_out_step:
                self.settling.broadcast_pending_buffers()
        self._nonfinite.before_step()

    def after_step(self, optimizer: Optimizer) -> None:
        """`optimizer` has stepped."""
        with exposed(self._observer, "after_step"):
            self.algorithm.after_step(optimizer)
            if self._steps.stepped(optimizer) and self.round.is_idle:
                self.algorithm.after_steps()
                if self._was_late and not self.algorithm.leaves_out_step:  # no forward may tell of the next round
                    self._before_round()
        if self._observer is not None:
            self._observer.stepped()

    # Life

    def verify(self) -> None:
        """Raise `ReplicaDivergence` unless all ranks hold the same parameters."""
        self.replica.check_same_parameters()
        replica_checks.check_same_values(self.channel, self.replica.names, self.replica.parameters)

    def observe(self, observer: Observer | None) -> None:
        """Report to `observer` from now on; None ends it."""
        if observer is not None and self._observer is not None:
            raise UsageError("this DDP is already observed. End the other Observer first, or give that one more sinks.")
        self._observer = self.reducer.observer = observer
        self.channel.observe(None if observer is None else Probe(observer.span_log, range(self.channel.world_size)))

    @property
    def closed(self) -> bool:
        return self.round.phase is Phase.CLOSED

    def close(self, *, settle: bool = True) -> None:
        """Settle, remove the hooks and end the communication thread; may be called again."""
        if self.closed:
            return
        try:
            if settle and self.settling.settle_at_close():
                self.reducer.check_last_round()
        finally:
            self.round.apply(Event.CLOSE)
            self._stop_listening()
            self.trained.remove_hooks()
            for handle in self._module_hooks:
                handle.remove()
            optimizer_hooks.stop_listening(self, self.replica.parameters)
            self.algorithm.close()
            self.channel.close()
            if self._owns_world:
                self._world.close()
