"""The result of a benchmark, and its JSON form.

benchmark           "all-reduce"
schema_version      1; grows when a field changes its meaning
date                when the measurement ended, ISO 8601, UTC
command             the command that repeats it
machine             cpu (model), cores (usable by this process), system, python, torch, murmura
ranks               processes, all on this machine
operation, dtype    "sum", "float32"
seconds_per_size    as ordered
contestants         by name: what it was, with versions
rows                one for each size and contestant:
    size_bytes      length of the message on each rank
    contestant      "murmura allocated", "murmura any tensor", "gloo", "mpich"
    microseconds    of one all-reduce: the median over the rounds of the slowest rank's time
    quartiles       [first, third] of the same, in microseconds
    gb_per_s        size_bytes / time, in 1e9 bytes a second
    rounds, batch   how often it was measured, and how many all-reduces were timed together each time
    ratio           on murmura's rows, by peer: the peer's median / this median. Above 1, murmura is faster
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from murmura import __version__
from murmura.benchmarks.contestants import MURMURA
from murmura.benchmarks.measure import Measurement, Sample
from murmura.benchmarks.spec import AllReduceSpec

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Row:
    """One contestant at one size; the module's docstring explains the fields."""

    size_bytes: int
    contestant: str
    microseconds: float
    quartiles: tuple[float, float]
    gb_per_s: float
    rounds: int
    batch: int
    ratio: dict[str, float]


@dataclass(frozen=True)
class Machine:
    """Where it was measured, with what."""

    cpu: str
    cores: int
    system: str
    python: str
    torch: str
    murmura: str

    @classmethod
    def here(cls) -> Machine:
        return cls(
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            torch=torch.__version__,
            murmura=__version__,
        )


@dataclass(frozen=True)
class Report:
    """A finished benchmark."""

    spec: AllReduceSpec
    date: str
    machine: Machine
    contestants: dict[str, str]
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, spec: AllReduceSpec, measurement: Measurement) -> Report:
        """What `measurement`, made just now on this machine, amounts to."""
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(spec, date, Machine.here(), measurement.about, rows_of(measurement.samples))

    def row(self, size_bytes: int, contestant: str) -> Row:
        return next(row for row in self.rows if (row.size_bytes, row.contestant) == (size_bytes, contestant))

    def to_json(self) -> str:
        """The text of a JSON file, as the module's docstring describes it."""
        fields = {
            "benchmark": "all-reduce",
            "schema_version": SCHEMA_VERSION,
            "date": self.date,
            "command": self.spec.command(),
            "machine": asdict(self.machine),
            "ranks": self.spec.ranks,
            "operation": "sum",
            "dtype": "float32",
            "seconds_per_size": self.spec.seconds,
            "contestants": self.contestants,
            "rows": [asdict(row) for row in self.rows],
        }
        return json.dumps(fields, indent=2) + "\n"


def rows_of(samples: Sequence[Sample]) -> tuple[Row, ...]:
    """The statistics of each sample, and the ratios between those of one size."""
    medians = {(sample.size_bytes, sample.contestant): statistics.median(sample.seconds) for sample in samples}

    def row(sample: Sample) -> Row:
        first, median, third = statistics.quantiles(sample.seconds, n=4, method="inclusive")
        peers = [name for size, name in medians if size == sample.size_bytes and name not in MURMURA]
        ratio = {peer: medians[sample.size_bytes, peer] / median for peer in peers}
        return Row(
            size_bytes=sample.size_bytes,
            contestant=sample.contestant,
            microseconds=median * 1e6,
            quartiles=(first * 1e6, third * 1e6),
            gb_per_s=sample.size_bytes / median / 1e9,
            rounds=len(sample.seconds),
            batch=sample.batch,
            ratio=ratio if sample.contestant in MURMURA else {},
        )

    return tuple(row(sample) for sample in samples)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown")
