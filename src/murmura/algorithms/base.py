"""The contract of an algorithm: what replicas exchange, and when.

An `Algorithm` is a frozen set of choices and can serve several models; `reify` makes the `AlgorithmImpl` that
runs for one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from murmura.errors import UsageError
from murmura.types import Exchanges

if TYPE_CHECKING:
    from murmura.buckets import Bucket
    from murmura.transports.base import Transport


Parameters = int | Sequence[Sequence[int]]
"""How many elements the parameters of a model have in all, or their shapes."""


class Replica(Protocol):
    """What an algorithm sees of the model it serves."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters that are kept together, in the order of `names`."""
        ...

    @property
    def buffers(self) -> Sequence[Tensor]:
        """The buffers that are kept together; a module may put another tensor in the place of one."""
        ...

    @property
    def buffer_names(self) -> Sequence[str]: ...

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Where gradients are exchanged: none while the algorithm exchanges something else."""
        ...

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those that have stepped on the parameters, in the order of their first steps."""
        ...

    def remember(self, optimizer: Optimizer) -> bool:
        """Remember that `optimizer` steps on the parameters; return whether it was unknown."""
        ...

    def forget_optimizers(self) -> None:
        """Know no optimizer: each counts as unknown when it steps again."""

    @property
    def transport(self) -> Transport:
        """The channel of this model."""
        ...

    trained: set[str]
    """The names of the parameters that take part: trainable when the algorithm started, or at some time since."""

    moments_may_differ: bool
    """Whether optimizers that have not stepped yet may hold moments of replicas that differed."""

    moments_pending: bool
    """Whether moments were to be averaged when not every rank knew the same optimizers, and have not been since."""

    @property
    def round(self) -> int:
        """How many rounds are complete: a round is one backward outside `no_sync()`."""
        ...


class AlgorithmImpl:
    """The running state of an algorithm for one model; every hook is a no-op unless overridden.

    The hooks run in the user's thread but for `on_bucket_ready`. Weights may be written between rounds (`before_round`,
    `settle`, `before_collective`, `close`) and around a step (`before_step`, `after_step`, `after_steps`) only: a
    second backward would read them.
    """

    exchanges: Exchanges = Exchanges.GRADIENTS
    """May change from round to round. Gradients come in buckets; weights may differ between the replicas."""

    works_alone = True
    """Whether `on_bucket_ready` has something to do in a world of one; if not, gradients stay where they are there."""

    averages = True
    """Whether gradients come back as a mean, which uneven data then weights."""

    weighs_first = False
    """Whether uneven data weights the gradients before their exchange, instead of the mean that comes back.

    For algorithms whose messages also carry residuals of earlier ones, which must not be weighted again.
    """

    in_step = True
    """Whether all ranks have completed as many rounds whenever they exchange; a resumed run is then checked for it."""

    leaves_out_step = False
    """Whether the step that has begun last changes nothing, as a rank skips it: nothing may wait for that one."""

    def __init__(self, process_group: Transport, **choices: Any) -> None:
        """Made by `Algorithm.reify` with the fields of the declaration, which become attributes of the same names."""
        self.process_group = process_group
        for name, value in choices.items():
            setattr(self, name, value)

    @property
    def innermost(self) -> AlgorithmImpl:
        """The algorithm of the present phase: this one, unless it runs others one after another."""
        return self

    @property
    def weight_in_mean(self) -> float:
        """How much this rank's replica counts in the mean of all: weights sum up to the number of ranks."""
        return 1.0

    def setup(self, replica: Replica) -> None:
        """Called once, before anything else, when the replicas hold equal weights."""

    def before_round(self) -> None:
        """Called between rounds, before a forward of the model or of a part of it; weights may be written."""

    def before_forward(self) -> None:
        """Called once a round: before its first training forward, or, if there is none, when its backward has run.

        In the latter case nothing may be written, and what the round before left pending may not have run yet.
        """

    def before_backward(self) -> None:
        """Called when a backward reaches an output of the model, and no gradient of the round has come yet.

        Gradients of the last round that were zeroed are gone by now; before the forward they may still have been there.
        """

    def on_bucket_ready(self, bucket: Bucket) -> None:
        """Called in bucket order when `bucket` is full, in the communication thread; may block.

        On NCCL it is called in backward's thread, where the communication stream is the current one: what it launches
        there overlaps with backward, and to block would hold backward up.
        """

    def parameters_unused(self, names: Sequence[str]) -> None:
        """Called before `after_backward` if no rank has a gradient of these parameters, on every rank with the same.

        They were exchanged as zeros, and stay without a gradient: what came back of them is thrown away.
        """

    def after_backward(self) -> None:
        """Called when backward is over and every bucket of the round has been exchanged."""

    def skip_step(self) -> None:
        """Called before `before_step` when the step will leave the weights as they are: a gradient is not finite."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Called when `optimizer` is about to step; not at all when the step is skipped."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Called when `optimizer` has stepped; not at all when the step is skipped."""

    def after_steps(self) -> None:
        """Called when the optimizers have stepped on every parameter that has a gradient; not if one was skipped."""

    def round_is_over(self) -> None:
        """Called when what was sent in the last round will not be taken back, although this rank takes no step.

        That is in a block of ``ddp.join()`` that this rank has left: only the others step.
        """

    def settle(self) -> None:
        """Called between rounds: do what still waits for a step, because it was skipped. May communicate.

        That is before a round begins, the state is saved, weights are loaded, or the model is closed.
        """

    def before_collective(self) -> None:
        """Called between rounds when this rank is about to wait for all others in an operation of the user's.

        The step may be skipped or still to come. Other ranks may be inside an exchange that follows their step, and
        wait for this one: so pending exchanges run now, unless an algorithm knows better.
        """
        self.settle()

    def before_replan(self, buckets: Sequence[Bucket]) -> None:
        """Called on all ranks before gradients move to other `buckets`: what is kept by element moves along."""

    def parameters_changed(self) -> None:
        """Called on all ranks when other parameters take part from now on (`Replica.trained`).

        Some were thawed, or the state of a run in which others took part is about to be loaded.
        """

    def weights_replaced(self) -> None:
        """Called when other weights have been loaded, on every rank: what was derived from the former ones is void."""

    def close(self) -> None:
        """Let go of threads and channels; idempotent."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that must travel in a checkpoint for a run to continue bit for bit."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless `state` fits the model and the choices here; change nothing, and send nothing.

        Called before `load_state_dict`, and where it is not the last to be loaded, before anything else is.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""


@dataclass(frozen=True)
class Algorithm:
    """A frozen set of choices, reusable on several models."""

    impl: ClassVar[type[AlgorithmImpl] | None] = None
    """The class that runs it, made with the transport and the fields of the declaration."""

    def reify(self, process_group: Transport) -> AlgorithmImpl:
        """The running algorithm for one model."""
        if self.impl is None:
            raise UsageError(f"{type(self).__name__} names no class that runs it: set `impl`, or override `reify`.")
        choices = {field.name: getattr(self, field.name) for field in fields(self)}
        return self.impl(process_group, **choices)

    # What commands, benchmarks and reports need to know of an algorithm

    def bytes_per_round(self, parameters: Parameters, num_ranks: int) -> float:
        """The mean bytes that each rank sends in a round for float32 `parameters`, if each has a host of its own.

        After a warm-up, if there is one. `parameters` are shapes, or the number of elements where shapes do not matter.
        No optimizer is known here: where moments are averaged, they count as Adam's, two for each element.
        """
        raise UsageError(
            f"no formula says what {self} sends. Define `bytes_per_round` in {type(self).__name__}, unless it depends "
            "on the run, as by the clock or in phases: then measure it."
        )

    @property
    def period(self) -> int:
        """The rounds after which the exchanges repeat: 1 if the ranks communicate in every round."""
        return 1

    @property
    def hides_exchange(self) -> bool:
        """Whether an exchange runs while the next gradients are computed, so that it may cost no time."""
        return False

    @property
    def keeps_replicas_equal(self) -> bool:
        """Whether all replicas hold the same weights after every `period`."""
        return True

    def own_optimizer(self, parameters: Iterable[nn.Parameter], lr: float, num_steps: int) -> Optimizer | None:
        """The optimizer that the algorithm needs, for a run of `num_steps`; None if it works with any."""
        return None
