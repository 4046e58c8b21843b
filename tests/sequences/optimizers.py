"""The optimizer of a simulated rank: who knows it, and when its moments are averaged."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from torch import Tensor

from sequences.actions import Net, Script
from sequences.algorithms import optimizer_of
from sequences.exchanges import Adam
from sequences.rules import Rule, Waiting


class WithOptimizer:
    """What a rank does with its optimizer."""

    script: Script
    model: Net
    rule: Rule
    own_gradients: dict[str, Tensor]

    def build_optimizer(self) -> None:
        self.optimizer: Any = self.make_optimizer()
        self.knows_optimizer = False  # it has begun a step, or was saved or loaded
        self.moments_may_differ = False  # weights were averaged, and not each optimizer's moments

    def exchange(self, channel: str, value: Any) -> Generator[Any, Any, list[Any]]:
        raise NotImplementedError

    def make_optimizer(self) -> Any:
        if self.script.optimizer != "qadam":
            return optimizer_of(self.script, self.model.parameters())
        return Adam(self.model, self.script.warmup)

    def adam(self) -> Adam:
        assert isinstance(self.optimizer, Adam)
        return self.optimizer

    def zero_grad(self, to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=to_none)
        self.own_gradients = {}

    def know_optimizer(self, *, anew: bool = False) -> Waiting:
        """The optimizer begins a step, is saved, or has been loaded."""
        was_known, self.knows_optimizer = self.knows_optimizer and not anew, True
        if not was_known and self.moments_may_differ and not self.rule.exchanges_weights:
            yield from self.average_moments()

    def average_known_moments(self) -> Waiting:
        """The algorithm was changed."""
        if self.rule.exchanges_weights:
            self.moments_may_differ = False
        elif self.moments_may_differ and all((yield from self.exchange("known", self.knows_optimizer))):
            yield from self.average_moments()
        elif self.moments_may_differ:
            self.knows_optimizer = False

    def average_moments(self) -> Waiting:
        optimizer = self.optimizer
        is_adam = isinstance(optimizer, Adam)
        parameters = dict(self.model.named_parameters())
        states = {name: optimizer.of(name) if is_adam else optimizer.state[parameters[name]] for name in parameters}
        own = {
            (name, key): value.clone()
            for name, state in states.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        everyone = yield from self.exchange("moments", (own, optimizer.num_steps if is_adam else 0))
        for name, key in {each for theirs, _ in everyone for each in theirs}:
            values = [theirs[name, key] for theirs, _ in everyone if (name, key) in theirs]
            states[name][key] = (sum(values) / len(everyone)).clone()
        if is_adam:
            optimizer.num_steps = min(number for _, number in everyone)
