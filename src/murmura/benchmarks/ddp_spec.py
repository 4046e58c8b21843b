"""What to measure of DDP: a frozen order, checked as a whole before any process is started."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from murmura.benchmarks.models import MODELS, Model
from murmura.errors import ConfigError
from murmura.types import parse

MAX_RANKS = 64


class DDPPeer(StrEnum):
    """Whom murmura's DDP can be measured against."""

    TORCH_DDP = "torch-ddp"


def parse_ddp_peers(names: Iterable[str]) -> tuple[DDPPeer, ...]:
    """Peers from options that may each hold several, separated by commas; each counts once, in order."""
    entries = [entry.strip() for name in names for entry in name.split(",")]
    return tuple(dict.fromkeys(parse(DDPPeer, entry, "--against") for entry in entries))


def parse_ranks(text: str) -> tuple[int, ...]:
    """The rank counts of a list separated by commas, each once, in order."""
    entries = [entry.strip() for entry in text.split(",")]
    wrong = [entry for entry in entries if not (entry.isascii() and entry.isdigit() and 1 <= int(entry) <= MAX_RANKS)]
    if wrong:
        raise ConfigError(
            f"--ranks={text}: {wrong[0]!r} is no number of ranks. Write a list of numbers from 1 to {MAX_RANKS}: 2,4."
        )
    return tuple(dict.fromkeys(int(entry) for entry in entries))


class StageKind(StrEnum):
    """What is measured of a model, in this order."""

    STEP = "step"
    SLOW_LINK = "slow link"
    MEMORY = "memory"


class Stage(NamedTuple):
    """One thing measured of one model on so many ranks, all contestants together."""

    kind: StageKind
    ranks: int
    model: str

    def __str__(self) -> str:
        kind = "" if self.kind is StageKind.STEP else f", {self.kind}"
        return f"{self.model}, {self.ranks} rank{'s' if self.ranks > 1 else ''}{kind}"


@dataclass(frozen=True, kw_only=True)
class DDPSpec:
    """An order for the DDP benchmark.

    Attributes:
        ranks: how many processes on this host, one measurement each; one rank is measured in any case.
        models: what they train, by name.
        peers: who is measured beside murmura.
        seconds: how long to measure each model with each number of ranks, all contestants together, and as long again
            on the slow link; a few rounds are measured in any case.
    """

    ranks: tuple[int, ...] = (2, 4)
    models: dict[str, Model] = field(default_factory=lambda: dict(MODELS))
    peers: tuple[DDPPeer, ...] = (DDPPeer.TORCH_DDP,)
    seconds: float = 10.0

    def __post_init__(self) -> None:
        faults = []
        if not self.ranks or not self.models:
            faults.append("there is nothing to measure. Name at least one number of ranks and one model.")
        if not 0 < self.seconds < math.inf:
            faults.append(f"{self.seconds} is not a time to measure for. Give seconds above 0.")
        if not os.path.exists("/proc/self/smaps_rollup"):
            faults.append("this system does not tell how much memory a process uses. Linux 4.14 or newer does.")
        if faults:
            raise ConfigError("\n".join(faults))

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """All that are measured: one rank first, which shows what wrapping alone costs."""
        return tuple(sorted({1, *self.ranks}))

    def command(self) -> str:
        """The command that gives this order."""
        options = {
            "ranks": ",".join(map(str, self.ranks)),
            "models": ",".join(self.models),
            "against": ",".join(self.peers),
            "seconds": f"{self.seconds:g}",
        }
        return " ".join(["murmura bench ddp", *(f"--{name} {value}" for name, value in options.items())])

    def stages(self) -> list[Stage]:
        """All that is done, in order; a slow link is as fast as the step before it says."""
        return [
            Stage(kind, count, model)
            for count in self.rank_counts
            for model in self.models
            for kind in (StageKind if count > 1 else (StageKind.STEP,))
        ]
