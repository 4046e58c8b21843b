"""The result of the DDP benchmark, and its JSON form.

benchmark           "ddp"
schema_version      1; grows when a field changes its meaning
date                when the measurement ended, ISO 8601, UTC
command             the command that repeats it
machine             cpu (model), cores (usable by this process), system, python, torch, murmura
load_before         processes that wanted a core in the minute before: above 0, others were at work too
seconds_per_stage   as ordered: for a model with a number of ranks
models              by name: about, parameters, gradient_bytes
contestants         by name: what it was, with versions
steps               ordinary training steps over shared memory, one row for each model, rank count and contestant:
    model, ranks    which
    contestant      "murmura", "murmura no overlap", "torch-ddp", "bare"
    milliseconds    of one step: the median over the rounds of the slowest rank's time
    quartiles       [first, third] of the same, in milliseconds
    phases          forward, backward (with the communication) and optimizer: medians of the rank slowest in each
    cpu_milliseconds  processor time of a step, all threads of the rank that uses most: the median. A busy machine
                    changes it less than the time
    rounds, batch   how often it was measured, and how many steps were timed together each time
    ratio           on the row of "murmura", by other contestant: its median / this median. Above 1, murmura is faster
slow_link           the same over a link on which communication takes about as long as backward; further fields:
    bandwidth       of the link of each rank, bits per second as in "100mbit"
    contestant      murmura "overlapped" and "not overlapped", both in small buckets, and with "default buckets"
    ratio           on the row of "overlapped"
memory              one row for each model, rank count and contestant:
    model, ranks, contestant
    bytes           of a rank, as the proportional set size: a page shared by n processes counts as 1/n
    extra_bytes     beyond the bare module
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from murmura.benchmarks.ddp_contestants import BARE, MURMURA, OVERLAPPED
from murmura.benchmarks.ddp_measure import PHASES, Sample
from murmura.benchmarks.ddp_spec import DDPSpec, Stage
from murmura.benchmarks.report import Machine

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class StepRow:
    """One contestant of one model on so many ranks; the module's docstring explains the fields."""

    model: str
    ranks: int
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
    """What one contestant holds; the module's docstring explains the fields."""

    model: str
    ranks: int
    contestant: str
    bytes: int
    extra_bytes: int


@dataclass(frozen=True)
class DDPReport:
    """A finished benchmark."""

    spec: DDPSpec
    date: str
    machine: Machine
    load_before: float
    contestants: dict[str, str]
    steps: tuple[StepRow, ...]
    slow_link: tuple[StepRow, ...]
    memory: tuple[MemoryRow, ...]

    def to_json(self) -> str:
        """The text of a JSON file, as the module's docstring describes it."""
        fields = {
            "benchmark": "ddp",
            "schema_version": SCHEMA_VERSION,
            "date": self.date,
            "command": self.spec.command(),
            "machine": asdict(self.machine),
            "load_before": self.load_before,
            "seconds_per_stage": self.spec.seconds,
            "models": {
                name: {
                    "about": model.about,
                    "parameters": model.num_parameters(),
                    "gradient_bytes": model.num_bytes(),
                }
                for name, model in self.spec.models.items()
            },
            "contestants": self.contestants,
            "steps": [_without_link(row) for row in self.steps],
            "slow_link": [asdict(row) for row in self.slow_link],
            "memory": [asdict(row) for row in self.memory],
        }
        return json.dumps(fields, indent=2) + "\n"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def step_rows(stage: Stage, samples: Sequence[Sample], bandwidth: str = "") -> list[StepRow]:
    """The statistics of each sample, and how murmura's compares with the others."""
    medians = {sample.contestant: statistics.median(sample.seconds) for sample in samples}

    def row(sample: Sample) -> StepRow:
        first, median, third = statistics.quantiles(sample.seconds, n=4, method="inclusive")
        others = {name: other / median for name, other in medians.items() if name != sample.contestant}
        return StepRow(
            model=stage.model,
            ranks=stage.ranks,
            contestant=sample.contestant,
            milliseconds=median * 1e3,
            quartiles=(first * 1e3, third * 1e3),
            phases={name: statistics.median(times) * 1e3 for name, times in zip(PHASES, sample.phases, strict=True)},
            cpu_milliseconds=statistics.median(sample.cpu_seconds) * 1e3,
            rounds=len(sample.seconds),
            batch=sample.batch,
            ratio=others if sample.contestant in (MURMURA, OVERLAPPED) else {},
            bandwidth=bandwidth,
        )

    return [row(sample) for sample in samples]


def memory_rows(stage: Stage, used: dict[str, float]) -> list[MemoryRow]:
    """What each contestant uses, and what of it the bare module does not."""
    return [
        MemoryRow(stage.model, stage.ranks, name, round(each), round(each - used[BARE])) for name, each in used.items()
    ]


def _without_link(row: StepRow) -> dict[str, Any]:
    fields = asdict(row)
    del fields["bandwidth"]
    return fields
