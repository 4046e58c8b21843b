"""One algorithm after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch.optim import Optimizer

from murmura.algorithms.base import Algorithm, AlgorithmImpl, Replica
from murmura.algorithms.checks import at_least_one, check_fields
from murmura.algorithms.names import as_algorithm
from murmura.algorithms.switching import replace_algorithm
from murmura.buckets import Bucket
from murmura.errors import ConfigError
from murmura.types import Exchanges

if TYPE_CHECKING:
    from murmura.transports.base import Transport


class PhasedImpl(AlgorithmImpl):
    """The running state of `Phased` for one model; `running` is the algorithm of the present phase."""

    in_step = False  # as far as it is known before the phase of a state is: one of them may go by the clock

    first: Algorithm
    until_round: int
    then: Algorithm

    def __init__(self, process_group: Transport, **choices: Any) -> None:
        super().__init__(process_group, **choices)
        self._is_first = True
        self.running = self.first.reify(process_group)

    @property
    def innermost(self) -> AlgorithmImpl:
        return self.running.innermost

    @property
    def exchanges(self) -> Exchanges:  # type: ignore[override]  # of the present phase
        return self.running.exchanges

    @property
    def works_alone(self) -> bool:  # type: ignore[override]
        return self.running.works_alone

    @property
    def averages(self) -> bool:  # type: ignore[override]
        return self.running.averages

    @property
    def weighs_first(self) -> bool:  # type: ignore[override]
        return self.running.weighs_first

    @property
    def leaves_out_step(self) -> bool:  # type: ignore[override]
        return self.running.leaves_out_step

    @property
    def weight_in_mean(self) -> float:
        return self.running.weight_in_mean

    def setup(self, replica: Replica) -> None:
        self._replica = replica
        self.running.setup(replica)

    def before_round(self) -> None:
        if self._is_first and self._replica.round >= self.until_round:
            self.running = replace_algorithm(self.running, self.then, self._replica)
            self._is_first = False
            self.running.setup(self._replica)
        self.running.before_round()

    def before_forward(self) -> None:
        self.running.before_forward()

    def before_backward(self) -> None:
        self.running.before_backward()

    def on_bucket_ready(self, bucket: Bucket) -> None:
        self.running.on_bucket_ready(bucket)

    def parameters_unused(self, names: Sequence[str]) -> None:
        self.running.parameters_unused(names)

    def after_backward(self) -> None:
        self.running.after_backward()

    def skip_step(self) -> None:
        self.running.skip_step()

    def before_step(self, optimizer: Optimizer) -> None:
        self.running.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        self.running.after_step(optimizer)

    def after_steps(self) -> None:
        self.running.after_steps()

    def round_is_over(self) -> None:
        self.running.round_is_over()

    def settle(self) -> None:
        self.running.settle()

    def before_collective(self) -> None:
        self.running.before_collective()

    def before_replan(self, buckets: Sequence[Bucket]) -> None:
        self.running.before_replan(buckets)

    def parameters_changed(self) -> None:
        self.running.parameters_changed()

    def weights_replaced(self) -> None:
        self.running.weights_replaced()

    def close(self) -> None:
        self.running.close()

    def state_dict(self) -> dict[str, Any]:
        return {"is_first": self._is_first, "running": self.running.state_dict()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_fields(state, is_first=bool, running=Mapping)
        if state["is_first"] == self._is_first:  # the other phase cannot tell before it runs
            self.running.check_state(state["running"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["is_first"] != self._is_first:  # saved in the other phase
            self.running.close()
            self._is_first = state["is_first"]
            self.running = (self.first if self._is_first else self.then).reify(self.process_group)
            self.running.setup(self._replica)
            self.running.check_state(state["running"])
        self.running.load_state_dict(state["running"])


@dataclass(frozen=True)
class Phased(Algorithm):
    """Runs `first` for the rounds before `until_round`, and `then` from that round on; each may be given by name.

    Where `first` lets replicas differ, `then` starts from their mean. Phases nest: `then` may be phased again.
    """

    impl: ClassVar[type[AlgorithmImpl]] = PhasedImpl

    first: Algorithm | str
    until_round: int
    then: Algorithm | str = field(kw_only=True)

    def __post_init__(self) -> None:
        at_least_one(until_round=self.until_round)
        for name in ("first", "then"):
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, as_algorithm(given))
            except ConfigError as error:
                raise ConfigError(f"{name}={given!r}: {error}") from None

    @property
    def period(self) -> int:
        return as_algorithm(self.then).period

    @property
    def hides_exchange(self) -> bool:
        return as_algorithm(self.then).hides_exchange

    @property
    def keeps_replicas_equal(self) -> bool:
        return as_algorithm(self.then).keeps_replicas_equal
