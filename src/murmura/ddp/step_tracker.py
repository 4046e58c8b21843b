"""Whether the optimizers have done all their steps of a round."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from murmura.ddp.replica import ModelReplica


class StepTracker:
    """Collects the parameters that optimizers have stepped on since the last round ended."""

    def __init__(self, replica: ModelReplica) -> None:
        self._replica = replica
        self._stepped: set[int] = set()  # ids of parameters
        self._expected: set[int] = set()  # those that an optimizer will step on, as far as is known
        self._is_waiting = False

    def round_ended(self) -> None:
        """Steps are expected now: of the optimizers that are known, or, before the first step, on every parameter."""
        self._is_waiting = True
        self._stepped.clear()
        optimizers = self._replica.optimizers
        self._expected = _ids(_held(optimizers) if optimizers else self._replica.parameters)

    def stepped(self, optimizer: Optimizer) -> bool:
        """`optimizer` has stepped; whether that was the last step on a parameter that has a gradient."""
        if not self._is_waiting:
            return False
        self._stepped |= _ids(_held([optimizer]))
        with_gradient = {id(each) for each in self._replica.parameters if each.grad is not None}
        self._is_waiting = not self._stepped >= with_gradient & self._expected
        return not self._is_waiting


def _held(optimizers: Iterable[Optimizer]) -> Iterable[nn.Parameter]:
    return (each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"])


def _ids(parameters: Iterable[nn.Parameter]) -> set[int]:
    return {id(each) for each in parameters}
