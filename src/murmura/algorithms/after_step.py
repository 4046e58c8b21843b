"""What algorithms that exchange weights after the optimizer's step have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch.optim import Optimizer

from murmura.algorithms.base import AlgorithmImpl, Replica
from murmura.algorithms.weights import FlatWeights
from murmura.types import Exchanges


class AfterStepImpl(AlgorithmImpl, ABC):
    """Calls `communicate` once for each round that `is_due`.

    That is when the optimizers have stepped on every parameter that has a gradient, or at the next forward if they
    have not: then a step was skipped.
    """

    exchanges = Exchanges.WEIGHTS
    _due = False

    @abstractmethod
    def is_due(self, number: int) -> bool:
        """Whether the ranks communicate after round `number`."""

    @abstractmethod
    def communicate(self) -> None:
        """Exchange the weights and write them."""

    def setup(self, replica: Replica) -> None:
        self._replica = replica
        self._weights = FlatWeights(replica)
        self._stepped: set[int] = set()  # ids of parameters
        self._expected: set[int] = set()  # those that an optimizer will step on, as far as is known

    def after_backward(self) -> None:
        self._due |= self.is_due(self._replica.round)
        self._stepped.clear()
        self._expected = self._held() if self._replica.optimizers else {id(each) for each in self._replica.parameters}

    def after_step(self, optimizer: Optimizer) -> None:
        if self._due:
            self._stepped.update(id(each) for group in optimizer.param_groups for each in group["params"])
            with_gradient = {id(each) for each in self._replica.parameters if each.grad is not None}
            if self._stepped >= with_gradient & self._expected:
                self.settle()

    def _held(self) -> set[int]:
        """Ids of what the optimizers that are known hold; before the first step, none is."""
        groups = [group for optimizer in self._replica.optimizers for group in optimizer.param_groups]
        return {id(each) for group in groups for each in group["params"]}

    def settle(self) -> None:
        if self._due:
            self._due = False
            self.communicate()
