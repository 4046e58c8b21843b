"""ComparisonSpec: what to compare, validated before any rank is started."""

from __future__ import annotations

import math
from dataclasses import dataclass

from murmura.algorithms.names import LOCAL_STEPS, PLAIN, algorithm_named
from murmura.errors import ConfigError
from murmura.tools.experiments.recipes import check_formula, parse_algorithms
from murmura.tools.experiments.settings import check_device
from murmura.tools.experiments.tasks import task_named
from murmura.transports.decorators.throttled import parse_rate

LOCAL = "local"
TORCH_DDP = "torch DDP"
BASELINE = PLAIN
BLOCK_STEPS = LOCAL_STEPS
"""The fewest steps of a contestant's turn, and a divisor of any other number: the interval of names without options."""

MAX_BLOCK_STEPS = 1000
"""The most steps of a turn: contestants with odd intervals would otherwise train for hours before one is measured."""

MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class ComparisonSpec:
    """A comparison of algorithms, and torch's DDP, on the same task."""

    task: str
    algorithms: tuple[str, ...]
    ranks: int
    links: tuple[str, ...]  # rates such as "100mbit", or LOCAL for shared memory; torch's DDP then talks over loopback
    steps: int  # rounded up to whole blocks of `block_steps`
    target: float | None = None  # the held-out loss that is raced for; None lets the contestants decide
    seed: int = 0
    device: str = "cpu"  # on "cuda" the ranks, joined by NCCL, share one GPU

    def __post_init__(self) -> None:
        task_named(self.task, self.seed)
        for name in parse_algorithms(self.algorithms):
            check_formula(name)
        if self.block_steps > MAX_BLOCK_STEPS:
            intervals = ", ".join(map(str, sorted(self._periods - {1})))
            raise ConfigError(
                f"--algorithms: steps are compared in turns in which every algorithm communicates equally often, and "
                f"for intervals of {intervals} steps the shortest that is a multiple of {BLOCK_STEPS} has "
                f"{self.block_steps} steps; at most {MAX_BLOCK_STEPS} are taken. Give intervals that have a smaller "
                "common multiple, or compare the algorithms one by one."
            )
        if not 2 <= self.ranks <= MAX_RANKS:
            raise ConfigError(f"ranks={self.ranks}: synchronising is compared with 2 to {MAX_RANKS} ranks.")
        check_device(self.device)
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps}: give a number at least 1.")
        if not self.links:
            raise ConfigError("--bandwidth names no link. Give a list such as 100mbit,1gbit,local.")
        for link in self.links:
            parse_link(link)

    @property
    def _periods(self) -> set[int]:
        return {algorithm_named(name).period for name in self.algorithms}

    @property
    def block_steps(self) -> int:
        """Steps of a contestant's turn: whole intervals of every algorithm, or one would be timed without exchanges."""
        return math.lcm(BLOCK_STEPS, *self._periods)

    @property
    def num_blocks(self) -> int:
        return -(-self.steps // self.block_steps)

    @property
    def num_steps(self) -> int:
        return self.num_blocks * self.block_steps

    @property
    def evaluate_every(self) -> int:
        """The interval of evaluations in blocks: about twenty in a run, and one after the last block."""
        return max(1, self.num_blocks // 20)


def parse_link(text: str) -> str:
    """Return a rate, or LOCAL, as reports print it."""
    link = text.strip().lower().replace(" ", "")
    if link != LOCAL:
        parse_rate(link)
    return link
