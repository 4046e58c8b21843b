"""Shell completion for the values of options, and the option that names algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from murmura.algorithms import algorithm_names


def among(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completer that offers the `names` with the prefix typed so far; in a list, that of its last entry."""
    known = list(names)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in known if name.startswith(last)]

    return complete


Algorithms = Annotated[
    str,
    typer.Option(
        help=f"A list of {', '.join(algorithm_names())}; or all. `murmura algorithms` describes each. Options and "
        "compressors follow a colon: powersgd:rank=2, gradient_allreduce:compressor=topk.",
        metavar="LIST",
        autocompletion=among(["all", *algorithm_names()]),
    ),
]
