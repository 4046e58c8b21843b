"""What simulated ranks share, and the optimizer of theirs that torch does not have."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

Key = tuple[str, int]


class Board:
    """What ranks bring to each exchange, by channel and number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.brought: defaultdict[Key, dict[int, Any]] = defaultdict(dict)

    def is_full(self, key: Key) -> bool:
        return len(self.brought[key]) == self.size

    def values(self, key: Key) -> list[Any]:
        return [value for _, value in sorted(self.brought[key].items(), key=lambda each: each[0])]


class Adam:
    """QAdamOptimizer's rule for one rank, by name; `fold` is called once for each step after the warm-up."""

    def __init__(self, model: nn.Module, warmup: int) -> None:
        self.model, self.warmup = model, warmup
        self.num_steps = 0
        self.state: dict[str, dict[str, Any]] = {}
        self.found_infinity = False
        self.folded = False

    @property
    def is_warm(self) -> bool:
        return self.num_steps >= self.warmup

    def of(self, name: str) -> dict[str, Any]:
        zeros = torch.zeros_like(self.model.get_parameter(name))
        return self.state.setdefault(name, {"m": zeros, "v": zeros.clone(), "num_m": 0, "num_v": 0})

    def first(self, name: str) -> Tensor:
        moment: Tensor = self.of(name)["m"]
        return moment

    @torch.no_grad()
    def fold(self) -> None:
        self.folded = True
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                self.of(name)["m"].mul_(0.9).add_(parameter.grad, alpha=0.1)

    @torch.no_grad()
    def step(self) -> None:
        folded, self.folded = self.folded, False
        if self.found_infinity:
            self.found_infinity = False
            return
        if self.is_warm and not folded:
            self.fold()
            self.folded = False
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            own = self.of(name)
            own["num_m"] += 1
            if not self.is_warm:
                own["num_v"] += 1
                own["m"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                own["v"].mul_(0.999).add_(parameter.grad**2, alpha=0.001)
            first = own["m"] / (1 - 0.9 ** own["num_m"])
            second = own["v"] / (1 - 0.999 ** own["num_v"])
            parameter -= 0.01 * first / (second.sqrt() + 1e-8)
        self.num_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "state": copy.deepcopy(self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps, self.state = state["num_steps"], copy.deepcopy(state["state"])
