"""The result of the DDP benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from murmura.tools.bench.ddp import BARE, MURMURA, OVERLAPPED, DDPSpec, Measured, Stage
from murmura.tools.bench.harness import Report, Sample, ratios, threads_of_a_rank
from murmura.tools.bench.steps import CPU, PHASES


@dataclass(frozen=True)
class StepRow:
    """One contestant of one model on so many ranks; benchmarks/README.md explains the fields."""

    model: str
    ranks: int
    threads: int
    contestant: str
    milliseconds: float
    quartiles: tuple[float, float]
    phases: dict[str, float]
    cpu_milliseconds: float
    rounds: int
    batch: int
    ratio: dict[str, float]
    bandwidth: str = ""


@dataclass(frozen=True)
class MemoryRow:
    """What one contestant holds; benchmarks/README.md explains the fields."""

    model: str
    ranks: int
    contestant: str
    bytes: int
    extra_bytes: int


@dataclass(frozen=True, kw_only=True)
class DDPReport(Report[DDPSpec]):
    """The finished benchmark."""

    benchmark: ClassVar[str] = "ddp"

    steps: tuple[StepRow, ...]
    slow_link: tuple[StepRow, ...]
    memory: tuple[MemoryRow, ...]

    def fields(self) -> dict[str, Any]:
        return {
            "seconds_per_stage": self.spec.seconds,
            "models": {name: model.described() for name, model in self.spec.models.items()},
            "steps": [{name: value for name, value in asdict(row).items() if value != ""} for row in self.steps],
            "slow_link": [asdict(row) for row in self.slow_link],
            "memory": [asdict(row) for row in self.memory],
        }


def report_of(spec: DDPSpec, found: Measured) -> DDPReport:
    """Return the report of what was just measured on this machine."""
    slow = {stage: samples for stage, (_, samples) in found.slow_link.items()}
    samples = [each for of_stage in (*found.steps.values(), *slow.values()) for each in of_stage]
    return DDPReport(
        spec=spec,
        contestants={each.contestant: each.about for each in samples},
        load_before=found.load_before,
        steps=tuple(row for stage, each in found.steps.items() for row in step_rows(stage, each)),
        slow_link=tuple(
            row for stage, each in slow.items() for row in step_rows(stage, each, found.slow_link[stage][0])
        ),
        memory=tuple(row for stage, used in found.memory.items() for row in memory_rows(stage, used)),
    )


def step_rows(stage: Stage, samples: Sequence[Sample], bandwidth: str = "") -> list[StepRow]:
    """The statistics of each sample, and how murmura's compares with the others."""

    def milliseconds(sample: Sample, figure: int) -> float:
        return statistics.median(sample.by_round(figure)) * 1e3

    return [
        StepRow(
            model=stage.model,
            ranks=stage.ranks,
            threads=threads_of_a_rank(stage.ranks),
            contestant=each.contestant,
            milliseconds=each.seconds * 1e3,
            quartiles=each.quartiles(1e3),
            phases={name: milliseconds(each, 1 + place) for place, name in enumerate(PHASES)},
            cpu_milliseconds=milliseconds(each, CPU),
            rounds=each.rounds,
            batch=each.batch,
            ratio=ratios(samples, each) if each.contestant in (MURMURA, OVERLAPPED) else {},
            bandwidth=bandwidth,
        )
        for each in samples
    ]


def memory_rows(stage: Stage, used: dict[str, float]) -> list[MemoryRow]:
    """What each contestant uses, and what of it the bare module does not."""
    return [
        MemoryRow(stage.model, stage.ranks, name, round(each), round(each - used[BARE])) for name, each in used.items()
    ]
