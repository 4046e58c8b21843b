"""Which parameters take part in the rounds, and how those that were frozen at first join them."""

from __future__ import annotations

from typing import Any

from murmura.ddp import hooks, replica_checks
from murmura.ddp.bucket_planner import BucketPlanner
from murmura.ddp.replica import ModelReplica


class TrainedParameters:
    """The parameters whose gradients `owner` is told of; a parameter that is frozen later stays one of them."""

    def __init__(self, owner: hooks.Hooked, replica: ModelReplica, planner: BucketPlanner) -> None:
        self._replica = replica
        self._planner = planner
        self._taken_in: set[int] = set()
        # Frozen ones are hooked too: a backward that only reaches parameters thawed since must be noticed.
        self._hooks: list[Any] = [
            hooks.hook_parameter(owner, parameter)
            for parameter in replica.parameters
            if parameter.is_floating_point() or parameter.is_complex()
        ]

    def restart(self) -> None:
        """Another algorithm starts with what is trainable now."""
        self._taken_in = set(self._replica.trainable())

    def resume(self) -> None:
        """Go on from a run whose buckets are known by now: what has no place in them has been thawed since."""
        self._taken_in &= set(self._planner.order)

    def thawed(self) -> list[int]:
        """The indices of parameters that are trainable by now and do not take part yet."""
        return [index for index in self._replica.trainable() if index not in self._taken_in]

    def take_in(self, thawed: list[int]) -> bool:
        """Let `thawed` take part, on every rank; whether that needs other buckets. Collective."""
        replica_checks.check_same_model(self._replica.transport, [self._replica.names[index] for index in thawed])
        self._taken_in.update(thawed)
        return self._planner.add(thawed)

    def remove_hooks(self) -> None:
        for handle in self._hooks:
            handle.remove()
