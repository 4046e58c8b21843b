"""Helpers for command-line options: comma-separated lists, and the command that repeats a measurement."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from murmura.errors import ConfigError

T = TypeVar("T")


def parse_list(values: str | Iterable[str], parse: Callable[[str], T]) -> tuple[T, ...]:
    """Return the entries of one or several comma-separated lists, without duplicates, in order.

    One `ConfigError` tells about every entry that `parse` refuses.
    """
    lists = [values] if isinstance(values, str) else values
    found: dict[T, None] = {}
    faults = []
    for entry in (entry.strip() for each in lists for entry in each.split(",")):
        try:
            found[parse(entry)] = None
        except ConfigError as error:
            faults.append(str(error))
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    return tuple(found)


def one_of(names: Iterable[str], option: str) -> Callable[[str], str]:
    """Return a parser for `parse_list` that accepts only `names`."""
    known = list(names)

    def parse(entry: str) -> str:
        if entry not in known:
            raise ConfigError(f"{option}={entry!r} is unknown. Known: {', '.join(map(repr, known))}.")
        return entry

    return parse


def typed_command() -> str:
    """Return the command line of this process, which repeats a measurement."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def check_seconds(seconds: float) -> list[str]:
    """Return the faults of a measuring time."""
    return [] if 0 < seconds < float("inf") else [f"{seconds} is not a time to measure for. Give seconds above 0."]


def raise_faults(faults: Iterable[str]) -> None:
    """Raise one `ConfigError` for all faults, if there are any."""
    if told := "\n".join(faults):
        raise ConfigError(told)
