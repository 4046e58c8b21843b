"""What to compare: a frozen order, checked as a whole before any rank is started."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from murmura.errors import ConfigError
from murmura.experiments.recipes import parse_algorithms
from murmura.experiments.tasks import task_named
from murmura.transports.decorators.throttled import parse_rate

LOCAL = "local"
TORCH_DDP = "torch DDP"
BASELINE = "gradient_allreduce"
BLOCK_STEPS = 8
"""Steps that a contestant takes in its turn: a whole number of every recipe's intervals."""

MAX_RANKS = 64
FILE = "spec.json"


@dataclass(frozen=True, kw_only=True)
class ComparisonSpec:
    """Every algorithm, and torch's DDP, on the same task.

    Attributes:
        links: rates such as "100mbit", or LOCAL for shared memory; torch's DDP then talks over loopback.
        steps: rounded up to whole blocks.
        target: the held-out loss that is raced for; None lets the contestants decide.
    """

    task: str
    algorithms: tuple[str, ...]
    ranks: int
    links: tuple[str, ...]
    steps: int
    target: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        task_named(self.task, self.seed)
        if not parse_algorithms(self.algorithms):
            raise ConfigError("--algorithms names none. Give a list, or all.")
        if not 2 <= self.ranks <= MAX_RANKS:
            raise ConfigError(f"ranks={self.ranks}: synchronising is compared with 2 to {MAX_RANKS} ranks.")
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps}: give a number at least 1.")
        if not self.links:
            raise ConfigError("--bandwidth names no link. Give a list such as 100mbit,1gbit,local.")
        for link in self.links:
            if link != LOCAL:
                parse_rate(link)

    @property
    def num_blocks(self) -> int:
        return -(-self.steps // BLOCK_STEPS)

    @property
    def num_steps(self) -> int:
        return self.num_blocks * BLOCK_STEPS

    @property
    def evaluate_every(self) -> int:
        """In blocks: about twenty times in a run, and after the last."""
        return max(1, self.num_blocks // 20)

    def command(self) -> str:
        """The command that repeats it."""
        words = ["murmura", "compare", "--task", self.task, "--algorithms", ",".join(self.algorithms)]
        words += ["--ranks", str(self.ranks), "--bandwidth", ",".join(self.links), "--steps", str(self.steps)]
        words += ["--target", f"{self.target:g}"] if self.target is not None else []
        words += ["--seed", str(self.seed)] if self.seed else []
        return shlex.join(words)

    def write(self, folder: Path) -> None:
        """For ranks that are started by a command."""
        (folder / FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> ComparisonSpec:
        told = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return cls(**{**told, "algorithms": tuple(told["algorithms"]), "links": tuple(told["links"])})


def parse_links(names: Iterable[str]) -> tuple[str, ...]:
    """Links from options that may each hold several, separated by commas; each counts once, in order."""
    return tuple(dict.fromkeys(each.strip().lower() for name in names for each in name.split(",") if each.strip()))
