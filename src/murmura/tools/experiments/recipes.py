"""Algorithms as the experiments try them: the configuration is that of the name, the optimizer is given here."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from enum import Enum

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from murmura.algorithms import Algorithm, algorithm_named, algorithm_names
from murmura.errors import ConfigError, UsageError
from murmura.tools.options import parse_list

log = logging.getLogger("murmura")


def optimizer_for(algorithm: str, parameters: Iterable[nn.Parameter], learning_rate: float, steps: int) -> Optimizer:
    """Return the optimizer for `algorithm` in a run of `steps` steps: its own, or AdamW."""
    held = list(parameters)
    own = algorithm_named(algorithm).own_optimizer(held, learning_rate, steps)
    return AdamW(held, lr=learning_rate, weight_decay=0.0) if own is None else own


def described(algorithm: Algorithm) -> str:
    """Return an algorithm's full configuration as text."""
    choices = ((field.name, getattr(algorithm, field.name)) for field in dataclasses.fields(algorithm))
    words = ", ".join(f"{name}={value.value if isinstance(value, Enum) else value!r}" for name, value in choices)
    return f"{type(algorithm).__name__}({words})"


def configuration(algorithm: str, steps: int) -> str:
    """Return the configuration that a name means in a run of `steps` steps, as reports print it."""
    optimizer = optimizer_for(algorithm, [nn.Parameter(torch.zeros(1))], 1e-3, steps)
    return f"{described(algorithm_named(algorithm))}, {described_optimizer(optimizer)}"


def described_optimizer(optimizer: Optimizer) -> str:
    """Return an optimizer's name, with the length of its warm-up if it has one."""
    steps = optimizer.defaults.get("warmup_steps")
    return type(optimizer).__name__ + ("" if steps is None else f"(warmup_steps={steps})")


def parse_algorithms(names: str | Iterable[str]) -> tuple[str, ...]:
    """Parse comma-separated lists of names, with or without options; "all" is every algorithm that can be measured."""
    chosen = parse_list(names, _parse_algorithm)
    if not chosen:
        raise ConfigError("--algorithms names none. Give a list, or all.")
    return tuple(dict.fromkeys(each for name in chosen for each in (_measurable() if name == "all" else [name])))


def _measurable() -> Iterator[str]:
    """All names but those that nobody asked for and an installed package announces in vain."""
    for name in algorithm_names():
        try:
            check_formula(name)
        except ConfigError as error:
            log.warning("%s is left out. %s", name, error)
        else:
            yield name


def _parse_algorithm(name: str) -> str:
    if name != "all":
        algorithm_named(name)
    return name


def check_formula(algorithm: str) -> None:
    """Raise a `ConfigError` unless a formula says what `algorithm` sends, which measurements are compared with."""
    try:
        algorithm_named(algorithm).bytes_per_round([[8, 8]], 2)
    except UsageError as error:
        raise ConfigError(f"--algorithms={algorithm!r}: {error}") from None
