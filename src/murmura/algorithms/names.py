"""Algorithms by name, for the command line, the environment and short scripts."""

from __future__ import annotations

from collections.abc import Callable

from murmura.algorithms.base import Algorithm
from murmura.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from murmura.errors import ConfigError

_BY_NAME: dict[str, Callable[[], Algorithm]] = {"gradient_allreduce": GradientAllReduceAlgorithm}


def algorithm_named(name: str) -> Algorithm:
    """The algorithm of that name, with its default choices."""
    if name not in _BY_NAME:
        raise ConfigError(f"algorithm={name!r} is unknown. Known: {', '.join(map(repr, sorted(_BY_NAME)))}.")
    return _BY_NAME[name]()
