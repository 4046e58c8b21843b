"""Algorithms as the experiments try them: the configuration is that of the name, the optimizer is given here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from enum import Enum

from torch import nn
from torch.optim import AdamW, Optimizer

from murmura.algorithms import Algorithm, QAdamOptimizer, algorithm_named, algorithm_names
from murmura.errors import ConfigError
from murmura.tools.options import one_of, parse_list

WARMUP_SHARE = 0.2
"""The share of QAdam's steps used for warm-up; its second moment is frozen afterwards, so it must be accurate."""


def optimizer_for(algorithm: str, module: nn.Module, learning_rate: float, steps: int) -> Optimizer:
    """Return the optimizer for `algorithm` in a run of `steps` steps."""
    if algorithm == "qadam":
        return QAdamOptimizer(module.parameters(), lr=learning_rate, warmup_steps=warmup_steps(steps))
    return AdamW(module.parameters(), lr=learning_rate, weight_decay=0.0)


def warmup_steps(steps: int) -> int:
    return max(1, round(WARMUP_SHARE * steps))


def described(algorithm: Algorithm) -> str:
    """Return an algorithm's full configuration as text."""
    choices = ((field.name, getattr(algorithm, field.name)) for field in dataclasses.fields(algorithm))
    words = ", ".join(f"{name}={value.value if isinstance(value, Enum) else value!r}" for name, value in choices)
    return f"{type(algorithm).__name__}({words})"


def configuration(algorithm: str, steps: int) -> str:
    """Return the configuration that a name means in a run of `steps` steps, as reports print it."""
    optimizer = f"QAdamOptimizer(warmup_steps={warmup_steps(steps)})" if algorithm == "qadam" else "AdamW"
    return f"{described(algorithm_named(algorithm))}, {optimizer}"


def parse_algorithms(names: str | Iterable[str]) -> tuple[str, ...]:
    """Parse comma-separated lists of names; "all" is every algorithm."""
    known = algorithm_names()
    chosen = parse_list(names, one_of(["all", *known], "--algorithms"))
    if not chosen:
        raise ConfigError("--algorithms names none. Give a list, or all.")
    return tuple(dict.fromkeys(each for name in chosen for each in (known if name == "all" else [name])))
