"""The benchmark harness: contestants take turns in the same processes, round after round.

A *round* gives each contestant one *batch* of operations that are timed together, and who begins rotates. So whatever
the machine does meanwhile, it does to all of them.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar, Generic, TypeVar

import torch

from murmura import Transport
from murmura.tools.experiments.machine import Machine
from murmura.tools.options import typed_command
from murmura.tools.progress import Progress, Tell, silent
from murmura.transports.host import num_cores

MIN_ROUNDS = 5  # with fewer a median is meaningless


class Contestant(ABC):
    """What is measured; every rank holds one.

    Attributes:
        name, about: as the report has them; `about` says what it is, with versions.
        batch: how many operations are timed together.
    """

    def __init__(self, name: str, about: str, batch: int = 1) -> None:
        self.name = name
        self.about = about
        self.batch = batch

    @abstractmethod
    def run_batch(self, number: int) -> Sequence[float]:
        """Run the batch of round `number`; figures of one operation as this rank sees them, its seconds first."""


@dataclass(frozen=True)
class Sample:
    """One contestant: the figures of an operation by rank, round and figure."""

    contestant: str
    about: str
    batch: int
    figures: list[list[list[float]]]

    def by_round(self, figure: int = 0) -> list[float]:
        """A figure, by default the seconds, of the rank where it was largest."""
        return [max(each[figure] for each in of_ranks) for of_ranks in zip(*self.figures, strict=True)]

    @property
    def rounds(self) -> int:
        return len(self.figures[0])

    @property
    def seconds(self) -> float:
        """The median over the rounds of the slowest rank's."""
        return statistics.median(self.by_round())

    def quartiles(self, scale: float) -> tuple[float, float]:
        """Return the first and third quartile of the seconds, times `scale`."""
        first, _, third = statistics.quantiles(self.by_round(), n=4, method="inclusive")
        return first * scale, third * scale


def take_turns(
    transport: Transport,
    contestants: Sequence[Contestant],
    seconds: float,
    tell: Tell = silent,
    stage: int = 0,
    min_rounds: int = MIN_ROUNDS,
) -> list[Sample]:
    """Measure all for about `seconds` together; every rank returns the same. Progress is told as that of `stage`."""
    rounds: list[list[Sequence[float]]] = []
    began = time.perf_counter()
    while (elapsed := slowest(transport, time.perf_counter() - began)) < seconds or len(rounds) < min_rounds:
        tell(Progress(stage, min(elapsed / seconds, len(rounds) / min_rounds, 0.99)))
        figures: list[Sequence[float]] = [()] * len(contestants)
        for turn in range(len(contestants)):
            place = (len(rounds) + turn) % len(contestants)  # so that no contestant always follows the same one
            figures[place] = contestants[place].run_batch(len(rounds))
        rounds.append(figures)
    by_rank = transport.all_gather(torch.tensor(rounds, dtype=torch.float64))
    assert isinstance(by_rank, list)
    tell(Progress(stage, 1.0, len(rounds)))
    return [
        Sample(each.name, each.about, each.batch, [of_rank[:, place].tolist() for of_rank in by_rank])
        for place, each in enumerate(contestants)
    ]


def slowest(transport: Transport, seconds: float) -> float:
    """Return the largest `seconds` of all ranks, so that all ranks decide alike."""
    told = torch.tensor([seconds], dtype=torch.float64)
    transport.all_reduce(told, "max")
    return told.item()


def ratios(samples: Sequence[Sample], to: Sample) -> dict[str, float]:
    """Return, by other contestant, the ratio of its median to that of `to`: above 1, `to` is faster."""
    return {each.contestant: each.seconds / to.seconds for each in samples if each is not to}


Spec = TypeVar("Spec")


@dataclass(frozen=True, kw_only=True)
class Report(ABC, Generic[Spec]):
    """A finished benchmark."""

    benchmark: ClassVar[str]
    schema_version: ClassVar[int] = 1

    spec: Spec
    contestants: dict[str, str]
    load_before: float
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: Machine = field(default_factory=Machine.here)

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Return the fields that this benchmark adds to its JSON file."""

    def to_json(self) -> str:
        """Return the text of a JSON file, whose fields benchmarks/README.md explains."""
        header = {
            "benchmark": self.benchmark,
            "schema_version": self.schema_version,
            "date": self.date,
            "command": typed_command(),
            "machine": asdict(self.machine),
            "load_before": self.load_before,
            "contestants": self.contestants,
        }
        return json.dumps(header | self.fields(), indent=2) + "\n"


def threads_of_a_rank(world_size: int) -> int:
    """As many of torch's threads as `murmura run` gives a rank, or fewer if OMP_NUM_THREADS says so."""
    return max(1, min(torch.get_num_threads(), num_cores() // world_size))


def take_share_of_cores(world_size: int) -> None:
    torch.set_num_threads(threads_of_a_rank(world_size))


def load() -> float:
    return os.getloadavg()[0]
