"""Algorithms by name, for the command line, the environment and short scripts."""

from __future__ import annotations

from murmura.algorithms.base import Algorithm
from murmura.algorithms.checks import instances_of
from murmura.compressors import Compressor, compressor_names
from murmura.errors import ConfigError
from murmura.registry import Registry, parse

LOCAL_STEPS = 20
"""The interval of `local_sgd`, `async` and all that derive from `diloco` when they are asked for by name."""

PLAIN = "gradient_allreduce"
"""The name of the default algorithm, with which commands and studies compare the others."""

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
    head = parse(name)[0]
    if head not in _REGISTRY and head in compressor_names():
        options = name.strip().removeprefix(head)
        inside = f"({options[1:]})" if options.startswith(":") else options
        raise ConfigError(f"algorithm={name!r}: {head!r} is a compressor: write '{PLAIN}:compressor={head}{inside}'.")
    return _REGISTRY.make(name)


def as_algorithm(algorithm: object) -> Algorithm:
    """`algorithm` itself, or the one of that name; a `ConfigError` says what to give if it is neither."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    if isinstance(algorithm, str):
        return algorithm_named(algorithm)
    kind = algorithm if isinstance(algorithm, type) else type(algorithm)
    if issubclass(kind, Algorithm):
        instances_of(Algorithm, algorithm=algorithm)
    if issubclass(kind, Compressor):
        wrapped = f"GradientAllReduceAlgorithm(compressor={kind.__name__}(...))"
        raise ConfigError(f"algorithm={algorithm!r} is a compressor: give {wrapped}.")
    raise ConfigError(
        f"algorithm={algorithm!r} is no Algorithm. Give an object, such as LocalSGDAlgorithm(8), or a name, such as "
        "'shift_one'."
    )
