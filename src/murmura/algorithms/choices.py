"""An algorithm's options as text, which is equal on two ranks if they were given the same options.

Only what means the same in every process goes in: types, plain values, and fields of dataclasses but for those with
``compare=False``. A function, a tensor, a device, or what an object of another kind holds may differ between ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

import torch

from murmura.compressors import Compressor


def choices_text(value: Any) -> str:
    """`value`, an algorithm or one of its options, in one line, much as its declaration is written."""
    if (plain := _plain_text(value)) is not None:
        return plain
    if isinstance(value, type):
        return value.__name__
    if inspect.isroutine(value):
        return "<function>"
    name = type(value).__name__
    if is_dataclass(value):
        return _call(name, {each.name: getattr(value, each.name) for each in fields(value) if each.compare})
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(sorted(f"{choices_text(key)}: {choices_text(each)}" for key, each in value.items())) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(choices_text, value)) + "]"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(choices_text, value))) + "}"
    if isinstance(value, Compressor) or callable(value):  # a topology is callable
        public = {key: each for key, each in getattr(value, "__dict__", {}).items() if not key.startswith("_")}
        return _call(name, {key: each for key, each in public.items() if _plain_text(each) is not None})
    return f"<{name}>"


def _call(name: str, options: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={choices_text(each)}' for key, each in options.items())})"


def _plain_text(value: Any) -> str | None:
    """The text of a value that means the same on every rank; None for any other value."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | str | bytes | complex | torch.dtype):
        return repr(value)
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        number = float(value)
        return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)  # 1.0 is 1
    return None
