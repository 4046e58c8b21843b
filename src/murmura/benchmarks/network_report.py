"""The result of the benchmark on slow links, and its JSON form.

benchmark           "network"
schema_version      1; grows when a field changes its meaning
date                when the measurement ended, ISO 8601, UTC
command             the command that repeats it
machine             cpu (model), cores (usable by this process), system, python, torch, murmura
load_before         processes that wanted a core in the minute before: above 0, others were at work too
hosts               simulated ones, a rank each
seconds_per_rate    as ordered
model               about, parameters, gradient_bytes
contestants         by name: what it was, with versions
rows                one for each rate and contestant:
    algorithm       its name, "torch-ddp", "torch-ddp fp16", "torch-ddp powersgd" or "no communication"
    rate            of every host's link in each direction, as in "100mbit"
    step_ms         milliseconds of a step: the median over the rounds of the slowest rank's; for algorithms that
                    communicate once in so many steps, the mean over that period
    quartiles       [first, third] of the same
    bytes           that a host sent in a step, as its interface counts them, headers included: the mean over hosts and
                    rounds
    bytes_by_host   the same for each host
    payload_bytes   `bytes` without the headers of Ethernet, IP and TCP
    formula_bytes   what a rank must send in a step, without the headers of a network
    ratio           torch DDP's step_ms / this: above 1, faster than torch's DDP; absent if that was not measured
    rounds, batch   how often it was measured, and how many steps were timed together each time
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from murmura.benchmarks.network_contestants import TORCH_DDP, formula_bytes
from murmura.benchmarks.network_measure import Sample
from murmura.benchmarks.network_spec import NetworkSpec
from murmura.benchmarks.report import Machine

SCHEMA_VERSION = 1
HEADER_BYTES = 14 + 20 + 32  # of a packet: Ethernet, IPv4, TCP with time stamps


@dataclass(frozen=True)
class NetworkRow:
    """One contestant at one rate; the module's docstring explains the fields."""

    algorithm: str
    rate: str
    step_ms: float
    quartiles: tuple[float, float]
    bytes: float
    bytes_by_host: tuple[float, ...]
    payload_bytes: float
    formula_bytes: float
    ratio: float | None
    rounds: int
    batch: int

    @property
    def bytes_off(self) -> float:
        """By what part of the formula the payload differs from it; 0 where nothing is to be sent."""
        return self.payload_bytes / self.formula_bytes - 1 if self.formula_bytes else 0.0


@dataclass(frozen=True)
class NetworkReport:
    """A finished benchmark."""

    spec: NetworkSpec
    date: str
    machine: Machine
    load_before: float
    contestants: dict[str, str]
    rows: tuple[NetworkRow, ...]

    def to_json(self) -> str:
        """The text of a JSON file, as the module's docstring describes it."""
        model = self.spec.model
        fields = {
            "benchmark": "network",
            "schema_version": SCHEMA_VERSION,
            "date": self.date,
            "command": self.spec.command(),
            "machine": asdict(self.machine),
            "load_before": self.load_before,
            "hosts": self.spec.hosts,
            "seconds_per_rate": self.spec.seconds,
            "model": {
                "about": model.about,
                "parameters": model.num_parameters(),
                "gradient_bytes": model.num_bytes(),
            },
            "contestants": self.contestants,
            "rows": [
                {name: value for name, value in asdict(row).items() if value is not None or name != "ratio"}
                for row in self.rows
            ],
        }
        return json.dumps(fields, indent=2) + "\n"


def rows_at(rate: str, samples: Sequence[Sample], shapes: Sequence[Sequence[int]]) -> list[NetworkRow]:
    """The statistics of each sample at one rate, and how they compare with torch's DDP."""
    medians = {sample.contestant: statistics.median(sample.seconds) for sample in samples}

    def row(sample: Sample) -> NetworkRow:
        first, median, third = statistics.quantiles(sample.seconds, n=4, method="inclusive")
        by_host = [statistics.fmean(each) for each in zip(*sample.sent_bytes, strict=True)]
        packets = statistics.fmean(each for packets in sample.sent_packets for each in packets)
        sent = statistics.fmean(by_host)
        return NetworkRow(
            algorithm=sample.contestant,
            rate=rate,
            step_ms=median * 1e3,
            quartiles=(first * 1e3, third * 1e3),
            bytes=sent,
            bytes_by_host=tuple(by_host),
            payload_bytes=sent - HEADER_BYTES * packets,
            formula_bytes=formula_bytes(sample.contestant, shapes, len(by_host)),
            ratio=medians[TORCH_DDP] / median if TORCH_DDP in medians else None,
            rounds=len(sample.seconds),
            batch=sample.batch,
        )

    return [row(sample) for sample in samples]
