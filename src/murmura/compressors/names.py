"""Compressors by name, wherever one is accepted: ``compressor="uint8"``, or with options "topk:ratio=0.05"."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from murmura.compressors.base import Compressor
from murmura.compressors.error_feedback import ErrorFeedback
from murmura.errors import ConfigError
from murmura.registry import Registry

Maker = TypeVar("Maker", bound=Callable[..., Compressor])


def _with_feedback(make: Callable[..., Compressor], feedback: bool = False) -> Callable[..., Compressor]:
    """What `make` does, with the options `feedback` and `decay` besides its own."""
    own = {"feedback": feedback, "decay": None}
    choices = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=value) for each, value in own.items()]

    def made(*, feedback: bool = feedback, decay: float | None = None, **options: Any) -> Compressor:
        _check_feedback(feedback)
        if not feedback and decay is not None:
            raise ConfigError(
                f"decay={decay!r} is of error feedback, and there is none: add feedback=true, or leave it out."
            )
        compressor = make(**options)
        return ErrorFeedback(compressor, decay=1.0 if decay is None else decay) if feedback else compressor

    made.__module__, made.__qualname__ = make.__module__, getattr(make, "__qualname__", repr(make))
    parameters = inspect.signature(make).parameters.values()
    made.__signature__ = inspect.Signature([*parameters, *choices])  # type: ignore[attr-defined]
    return made


def _check_feedback(feedback: object) -> None:
    if not isinstance(feedback, bool):
        raise ConfigError(f"feedback={feedback!r} must be true or false.")


_REGISTRY: Registry[Compressor] = Registry(Compressor, "compressor", "murmura.compressors", _with_feedback)  # type: ignore[type-abstract]


def register_compressor(name: str, *, feedback: bool = False, **defaults: Any) -> Callable[[Maker], Maker]:
    """A decorator that gives a `Compressor`, or a function that makes one, a name.

    With `feedback` the name means the compressor inside `ErrorFeedback`, which compressors need that drop most of their
    input; the option feedback=true or feedback=false of a name overrides that, and the option decay= is passed to
    `ErrorFeedback`. `defaults` are keyword arguments that options override. A package announces its compressors as
    entry points of the group `murmura.compressors`.
    """

    _check_feedback(feedback)
    register = _REGISTRY.register(name, **defaults)

    def add(make: Maker) -> Maker:
        register(_with_feedback(make, feedback) if callable(make) else make)
        return make

    return add


def compressor_names() -> list[str]:
    """The names that `compressor_named` knows."""
    return _REGISTRY.names()


def compressor_named(name: str) -> Compressor:
    """The compressor of that name, with its default choices but for options: "topk:ratio=0.05:feedback=false"."""
    return _REGISTRY.make(name)
