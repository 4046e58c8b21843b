"""Sizes as people write them: "4KiB" is 4096 bytes, "1.5 MiB" is 1572864, a plain number is bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from murmura.errors import ConfigError

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BY_LOWER_CASE = {unit.lower(): num_bytes for unit, num_bytes in _UNITS.items()}
_DECIMAL = {"k", "kb", "m", "mb", "g", "gb"}


def parse_size(text: str) -> int:
    """The bytes that `text` means; a ConfigError if it is no whole number of them."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(f"{text.strip()!r} is not a size. Write bytes, or a number with KiB, MiB or GiB: 64KiB.")
    number, unit = match.groups()
    scale = _BY_LOWER_CASE.get(unit.lower() or "b")
    if scale is None:
        advice = f"Write {number}{unit[0].upper()}iB" if unit.lower() in _DECIMAL else f"Use {', '.join(_UNITS)}"
        raise ConfigError(f"{text.strip()!r}: {unit!r} is not a unit of size here. {advice}.")
    num_bytes = Fraction(number) * scale
    if num_bytes.denominator != 1:
        raise ConfigError(f"{text.strip()!r} is not a whole number of bytes.")
    return int(num_bytes)


def format_size(num_bytes: int) -> str:
    """`num_bytes` in the largest unit that divides it: "25 MiB", "1000 B"; `parse_size` reads it back."""
    unit, scale = next(
        (unit, scale) for unit, scale in reversed(_UNITS.items()) if num_bytes % scale == 0 and num_bytes >= scale
    )
    return f"{num_bytes // scale} {unit}"
