"""The settings with which each algorithm is tried: the documented ones, in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW, Optimizer

from murmura.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    DiLoCoAlgorithm,
    LocalSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    algorithm_named,
    algorithm_names,
)
from murmura.errors import ConfigError

WARMUP_SHARE = 0.2
"""Of QAdam's steps: the second moment is kept as it is afterwards, so it must be worth keeping."""


@dataclass(frozen=True)
class Recipe:
    """An algorithm, and the optimizer it is tried with."""

    name: str
    algorithm: Callable[[], Algorithm]
    optimizer: Callable[[nn.Module, float, int], Optimizer]  # given the learning rate and the number of steps


def _adamw(module: nn.Module, learning_rate: float, steps: int) -> Optimizer:
    return AdamW(module.parameters(), lr=learning_rate, weight_decay=0.0)


def _qadam(module: nn.Module, learning_rate: float, steps: int) -> Optimizer:
    return QAdamOptimizer(module.parameters(), lr=learning_rate, warmup_steps=max(1, round(WARMUP_SHARE * steps)))


_TUNED: dict[str, Callable[[], Algorithm]] = {
    "local_sgd": lambda: LocalSGDAlgorithm(interval=8),
    "diloco": lambda: DiLoCoAlgorithm(interval=8, outer_lr=0.7, outer_momentum=0.6),
    "async": lambda: AsyncModelAverageAlgorithm(sync_interval_rounds=4),
    "qadam": QAdamAlgorithm,
}


def recipe_named(name: str) -> Recipe:
    """How the algorithm of that name is tried."""
    if name not in algorithm_names():
        raise ConfigError(f"algorithm {name!r} is unknown. Known: {', '.join(map(repr, algorithm_names()))}.")
    algorithm = _TUNED.get(name, lambda: algorithm_named(name))
    return Recipe(name, algorithm, _qadam if name == "qadam" else _adamw)


def parse_algorithms(names: Iterable[str]) -> tuple[str, ...]:
    """Names from options that may each hold several, separated by commas; "all" is every one of them."""
    entries = [entry.strip() for name in names for entry in name.split(",") if entry.strip()]
    chosen = [each for entry in entries for each in (algorithm_names() if entry == "all" else [entry])]
    for name in chosen:
        recipe_named(name)
    return tuple(dict.fromkeys(chosen))
