"""Algorithms by name, for the command line, the environment and short scripts."""

from __future__ import annotations

from murmura.algorithms.base import Algorithm
from murmura.registry import Registry

LOCAL_STEPS = 20
"""The interval of `local_sgd`, `async` and all that derive from `diloco` when they are asked for by name."""

PLAIN = "gradient_allreduce"

_REGISTRY: Registry[Algorithm] = Registry(Algorithm, "algorithm", "murmura.algorithms")

register_algorithm = _REGISTRY.register
"""A decorator that gives an `Algorithm`, or a function that makes one, a name: ``@register_algorithm("mine", rank=2)``.

The keywords are the choices that the name stands for; options behind the name change them. A package announces its
algorithms as entry points of the group `murmura.algorithms` instead, so that commands know them too.
"""


def algorithm_names() -> list[str]:
    """The names that `algorithm_named` knows, the plain one first."""
    return [PLAIN, *(name for name in _REGISTRY.names() if name != PLAIN)]


def algorithm_named(name: str) -> Algorithm:
    """The algorithm of that name, with its default choices but for options: "diloco:interval=50:compressor=bf16"."""
    return _REGISTRY.make(name)
