"""Shell completion for the values of options."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def among(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completer that offers the `names` with the prefix typed so far; in a list, that of its last entry."""
    known = list(names)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in known if name.startswith(last)]

    return complete
