"""Which parameters take part in the rounds, and how those that were frozen at first join them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from murmura.algorithms import AlgorithmImpl
from murmura.algorithms.checks import NOT_SAVED
from murmura.ddp import hooks, replica_checks
from murmura.ddp.bucket_planner import BucketPlanner
from murmura.ddp.gradient_reducer import GradientReducer
from murmura.ddp.replica import ModelReplica
from murmura.errors import ConfigError


class TrainedParameters:
    """The parameters whose gradients `owner` is told of; a parameter that is frozen later stays one of them."""

    def __init__(
        self, owner: hooks.Hooked, replica: ModelReplica, planner: BucketPlanner, reducer: GradientReducer
    ) -> None:
        self._replica = replica
        self._planner = planner
        self._reducer = reducer
        # Frozen ones are hooked too: a backward that only reaches parameters thawed since must be noticed.
        self._hooks: list[Any] = [
            hooks.hook_parameter(owner, parameter)
            for parameter in replica.parameters
            if parameter.is_floating_point() or parameter.is_complex()
        ]

    def thawed(self) -> list[int]:
        """The indices of parameters that are trainable by now and do not take part yet."""
        return [index for index in self._replica.trainable() if self._replica.names[index] not in self._replica.trained]

    def take_in_thawed(self, algorithm: AlgorithmImpl) -> None:
        """Let parameters that were frozen until now take part under the running `algorithm`, on every rank."""
        thawed = self.thawed()
        if thawed:
            algorithm.settle()  # ranks that have taken a step that was skipped here have exchanged what it owes
            if self._place(thawed):
                self._reducer.replan(algorithm)
            self._replica.trained.update(self._replica.names[index] for index in thawed)
            algorithm.parameters_changed()

    def start_anew(self) -> None:
        """Another algorithm starts, on every rank, with what is trainable now; it keeps nothing yet."""
        new = sorted(set(self._replica.trainable()) - set(self._planner.order))
        if new and self._place(new):
            self._reducer.replan()

    def _place(self, indices: list[int]) -> bool:
        """Give parameters a place among the gradients; whether that needs other buckets. Collective."""
        replica_checks.check_same_model(self._replica.transport, [self._replica.names[index] for index in indices])
        return self._planner.add(indices)

    def state_dict(self) -> list[str]:
        """The names of those that take part."""
        return [name for name in self._replica.names if name in self._replica.trained]

    def check_state(self, names: object, plan: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless `names` are of parameters that have a place in `plan`, or None."""
        placed = [name for bucket in plan["buckets"] for name in bucket]
        if names is not None and not (isinstance(names, list) and all(each in placed for each in names)):
            raise ConfigError(
                f"'trained' in this state is {names!r}, of which 'plan' has no place for some. {NOT_SAVED}"
            )

    def load_state_dict(self, names: Iterable[str] | None, algorithm: AlgorithmImpl) -> None:
        """Let `names` take part, as in the run whose plan has been loaded, whichever are frozen here.

        None stands for all that have a place. The state of `algorithm` is still to be loaded.
        """
        placed = (self._replica.names[index] for index in self._planner.order)
        before, self._replica.trained = self._replica.trained, set(placed if names is None else names)
        if self._replica.trained != before:
            algorithm.parameters_changed()

    def remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()
