"""What a shell offers for the value of an option."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def among(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Offer those of `names` that begin as the word so far; in a list, as its last entry does."""
    known = list(names)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in known if name.startswith(last)]

    return complete
