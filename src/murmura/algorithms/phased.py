"""One algorithm after another."""

from __future__ import annotations

from dataclasses import dataclass, field

from murmura.algorithms.base import Algorithm
from murmura.errors import not_built


@dataclass(frozen=True)
class Phased(Algorithm):
    """Runs `first` for the rounds before `until_round`, and `then` from that round on."""

    first: Algorithm
    until_round: int
    then: Algorithm = field(kw_only=True)

    def __post_init__(self) -> None:
        not_built("murmura.Phased")
