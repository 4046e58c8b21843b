"""What simulated ranks share, and the optimizer of theirs that torch does not have."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
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


def result_of(kind: str, everyone: Sequence[tuple[float, Mapping[str, Tensor], float]]) -> list[float]:
    """What a collective of that kind returns; ranks bring a number, parameters, and their weight in the mean."""
    numbers, replicas = [number for number, *_ in everyone], [each for _, each, _ in everyone]
    mean = {name: sum(share * each[name] for _, each, share in everyone) / len(everyone) for name in replicas[0]}
    if kind == "average_losses":
        counts = [rank + 1 for rank in range(len(everyone))]
        return [sum(value * count for value, count in zip(numbers, counts, strict=True)) / sum(counts)]
    if kind in ("all_reduce", "channel"):
        return [sum(numbers)]
    if kind == "consensus":
        squares = [sum(float((own[name] - mean[name]).square().sum()) for name in mean) for own in replicas]
        return [(sum(squares) / len(squares)) ** 0.5]
    if kind == "average":
        return [float(sum(each.sum() for each in mean.values()))]  # type: ignore[union-attr]
    return []


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
        num_m, num_v = torch.zeros(()), torch.zeros((), dtype=torch.float64)  # torch's Adam counts in float32
        return self.state.setdefault(name, {"m": zeros, "v": zeros.clone(), "num_m": num_m, "num_v": num_v})

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
        skips, self.found_infinity = self.found_infinity, False
        if skips or all(each.grad is None for each in self.model.parameters()):
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
            first = own["m"] / (1 - 0.9 ** own["num_m"].item())
            second = own["v"] / (1 - 0.999 ** own["num_v" if self.is_warm else "num_m"].item())
            parameter -= 0.01 * first / (second.sqrt() + 1e-8) * (second != 0)
        self.num_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "state": copy.deepcopy(self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps, self.state = state["num_steps"], copy.deepcopy(state["state"])
