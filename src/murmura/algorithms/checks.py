"""Checks of an algorithm's options, where they are given; `DDP` uses them for its own."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from numbers import Real

from torch import Tensor

from murmura.compressors import Compressor, compressor_named
from murmura.errors import ConfigError, UsageError


def instances_of(kind: type, **choices: object) -> None:
    """Raise `ConfigError` unless each of `choices` is an object of `kind`, rather than its class or its name."""
    for name, value in choices.items():
        if not isinstance(value, kind):
            made_by = value if isinstance(value, type) and issubclass(value, kind) else kind
            raise ConfigError(
                f"{name}={value!r} is no {kind.__name__}: give an object, such as {made_by.__name__}(...)."
            )


NOT_SAVED = "It was edited, or another version saved it. Load another checkpoint, or leave the algorithm's state out."


def check_fields(state: object, where: str = "this state", /, **kinds: type | tuple[type, ...]) -> None:
    """Raise `ConfigError` unless `state`, as errors call it `where`, holds an object of its kind in each field."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"{where} is {reprlib.repr(state)} instead of a dict. {NOT_SAVED}")
    for name, kind in kinds.items():
        if name not in state:
            raise ConfigError(f"{where} has no {name!r}. {NOT_SAVED}")
        value = state[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{name!r} in {where} is {reprlib.repr(value)}. {NOT_SAVED}")


def check_saved_tensor(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value`, which a state holds for parameter `name`, is a tensor like a parameter."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        raise ConfigError(f"this state holds {reprlib.repr(value)} for {name!r} instead of a tensor. {NOT_SAVED}")


def check_replica(replica: object) -> None:
    """Raise `UsageError` unless `replica` is a `Replica`."""
    if not hasattr(replica, "trained"):
        raise UsageError(f"replica={replica!r} is no Replica: give what setup(replica) gets.")


def yes_or_no(**choices: object) -> None:
    """Raise `ConfigError` unless each of `choices` is True or False."""
    for name, value in choices.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be True or False.")


def is_real(value: object) -> bool:
    """Whether `value` is a finite number."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def at_least_one(**choices: int) -> None:
    """Raise `ConfigError` unless each of `choices` is a whole number, at least 1."""
    at_least(1, **choices)


def at_least(least: int, **choices: int) -> None:
    """Raise `ConfigError` unless each of `choices` is a whole number, at least `least`."""
    for name, value in choices.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value!r} must be a whole number, at least {least}.")


def as_compressor(compressor: object) -> Compressor:
    """`compressor` itself, or the one of that name."""
    if isinstance(compressor, str):
        return compressor_named(compressor)
    instances_of(Compressor, compressor=compressor)
    assert isinstance(compressor, Compressor)
    return compressor


def take_compressor(choices: object, compressor: object) -> None:
    """Set the field `compressor` of `choices`, a frozen dataclass, to an object; `compressor` may be its name."""
    object.__setattr__(choices, "compressor", as_compressor(compressor))
