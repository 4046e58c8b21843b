"""The benchmark on slow links: steps and bytes of every algorithm on simulated hosts, beside torch's DDP.

`run_network` makes the hosts and starts a rank on each; `measure` is what the ranks do. The rank asks for the next rate
when it has done with the last: in the folder that all share, the first line of `progress` for a rate asks for it, and
`shaped-I` says that the links have rate I.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed

from murmura import MurmuraError, Transport
from murmura.algorithms import algorithm_names
from murmura.tools import ranks
from murmura.tools.bench.checks import check_in_step
from murmura.tools.bench.ddp import TORCH_DDP
from murmura.tools.bench.harness import Report, Sample, load, slowest, take_turns
from murmura.tools.bench.models import MLP, Model
from murmura.tools.bench.network_contestants import (
    BARE,
    TORCHS,
    exchanges_in_background,
    formula_bytes,
    method_of,
    period,
    stays_together,
    steps_per_batch,
    warm_up_steps,
)
from murmura.tools.bench.steps import BURST_BYTES, CPU, SENT_BYTES, SENT_PACKETS, Method, prepare
from murmura.tools.lab import Hosts
from murmura.tools.lab.network import Counters, interface_traffic
from murmura.tools.options import check_seconds, raise_faults
from murmura.tools.progress import PROGRESS, Progress, ProgressFile, Tell, silent, teller, watching
from murmura.transports.decorators.throttled import parse_rate

MAX_HOSTS = 16  # every host trains a replica for each contestant, all in the memory of one machine
START_SECONDS = 300.0  # to start, wrap and warm up, also on a busy machine
SLACK = 4.0  # how much longer than the formula says anything may take
MIN_ROUNDS = 3
SHAPING_SECONDS = 30.0
POLL_SECONDS = 0.02
HEADER_BYTES = 14 + 20 + 32  # of a packet: Ethernet, IPv4, TCP with time stamps


# Plain all-reduce with the compressors that shrink gradients the most.
FEW_BYTES = tuple(f"gradient_allreduce:compressor={name}" for name in ("uint4", "sign", "topk"))

# Much to send (10.01 million parameters) and little to compute: few rows a rank, and an optimizer without state.
MODEL = MLP(batch=4, layers=10, width=1000, momentum=0.0)


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """The specification of the benchmark on slow links."""

    hosts: int = 4  # how many are simulated; each holds one rank
    rates: tuple[str, ...] = ("100mbit", "1gbit")  # of every host's link, in both directions, one measurement each
    algorithms: tuple[str, ...] = (*algorithm_names(), *FEW_BYTES)  # by name, who is measured
    against: tuple[str, ...] = TORCHS  # which forms of torch's DDP are measured beside them
    seconds: float = 120.0  # for each rate, all contestants together; `MIN_ROUNDS` are measured in any case
    model: MLP = MODEL  # what they train

    def __post_init__(self) -> None:
        faults = []
        if not 2 <= self.hosts <= MAX_HOSTS:
            faults.append(f"{self.hosts} hosts: give from 2, which is the least that communicate, to {MAX_HOSTS}.")
        if not self.rates or not self.algorithms:
            faults.append("there is nothing to measure. Name at least one rate and one algorithm.")
        raise_faults([*faults, *check_seconds(self.seconds)])

    def contestants(self) -> list[str]:
        """Return the contestants, in the order of the table."""
        return [*self.against, *self.algorithms, BARE]


@dataclass(frozen=True)
class NetworkRow:
    """One contestant at one rate; benchmarks/README.md explains the fields."""

    algorithm: str
    rate: str
    step_ms: float
    quartiles: tuple[float, float]
    cpu_ms: float
    bytes: float
    bytes_by_host: tuple[float, ...]
    payload_bytes: float
    formula_bytes: float
    in_flight_bytes: float | None
    ratio: float | None
    rounds: int
    batch: int

    @property
    def bytes_off(self) -> float:
        """By what part of the formula the payload differs from it; 0 where nothing is to be sent."""
        return self.payload_bytes / self.formula_bytes - 1 if self.formula_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class NetworkReport(Report[NetworkSpec]):
    """The finished benchmark."""

    benchmark: ClassVar[str] = "network"

    rows: tuple[NetworkRow, ...]

    def fields(self) -> dict[str, Any]:
        return {
            "hosts": self.spec.hosts,
            "seconds_per_rate": self.spec.seconds,
            "model": self.spec.model.described(),
            "rows": [{name: value for name, value in asdict(row).items() if value is not None} for row in self.rows],
        }


def run_network(spec: NetworkSpec, on_progress: Tell = silent) -> NetworkReport:
    """Measure `spec` on hosts of its own, which needs root. `on_progress` is called from a thread.

    Raises a `MurmuraError` if hosts cannot be made, a rank fails, or replicas drift apart that should not.
    """
    load_before = load()
    shapes = [tuple(parameter.shape) for parameter in spec.model.build().parameters()]
    with tempfile.TemporaryDirectory(prefix="murmura-bench-") as name, Hosts(spec.hosts) as hosts:
        folder = Path(name)

        def told(progress: Progress) -> None:
            shaped = folder / f"shaped-{progress.stage}"
            if not shaped.exists():
                hosts.shape(spec.rates[progress.stage])
                shaped.touch()
            on_progress(progress)

        wait_seconds, total_seconds = deadlines(spec, shapes)
        with watching(folder / PROGRESS, told):
            hosts.run(
                ranks.command(folder, measure_as_rank, spec, folder),
                env={"MURMURA_TIMEOUT": f"{wait_seconds:.0f}"},
                capture=True,
                timeout=total_seconds,
            )
        samples: list[list[Sample]] = ranks.result(folder)
    rows = [row for rate, at_rate in zip(spec.rates, samples, strict=True) for row in rows_at(rate, at_rate, shapes)]
    about = {each.contestant: each.about for each in samples[0]}
    return NetworkReport(spec=spec, contestants=about, load_before=load_before, rows=tuple(rows))


def deadlines(spec: NetworkSpec, shapes: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Seconds that one wait of a rank, and the whole measurement, may take at most."""
    slowest_rate = min(parse_rate(rate) for rate in spec.rates)
    periods = [period(name) * formula_bytes(name, shapes, spec.hosts) / slowest_rate for name in spec.contestants()]
    rounds = len(spec.rates) * (spec.seconds + (MIN_ROUNDS + 1) * SLACK * sum(periods))
    return START_SECONDS / 2 + SLACK * max(periods), START_SECONDS + SLACK * rounds


def rows_at(rate: str, samples: Sequence[Sample], shapes: Sequence[Sequence[int]]) -> list[NetworkRow]:
    """The statistics of each sample at one rate, and how they compare with torch's DDP."""
    torch_seconds = next((each.seconds for each in samples if each.contestant == TORCH_DDP), None)

    def row(sample: Sample) -> NetworkRow:
        by_host = [statistics.fmean(each[SENT_BYTES] for each in of_rank) for of_rank in sample.figures]
        packets = statistics.fmean(each[SENT_PACKETS] for of_rank in sample.figures for each in of_rank)
        sent = statistics.fmean(by_host)
        return NetworkRow(
            algorithm=sample.contestant,
            rate=rate,
            step_ms=sample.seconds * 1e3,
            quartiles=sample.quartiles(1e3),
            cpu_ms=statistics.median(each[CPU] for of_rank in sample.figures for each in of_rank) * 1e3,
            bytes=sent,
            bytes_by_host=tuple(by_host),
            payload_bytes=sent - HEADER_BYTES * packets,
            formula_bytes=formula_bytes(sample.contestant, shapes, len(by_host)),
            in_flight_bytes=max(sample.by_round(BURST_BYTES)) or None,
            ratio=torch_seconds / sample.seconds if torch_seconds is not None else None,
            rounds=sample.rounds,
            batch=sample.batch,
        )

    return [row(sample) for sample in samples]


# On the rank of every host


@dataclass(frozen=True)
class Link:
    """What the ranks know of the links of their hosts."""

    rates_bytes: Sequence[float]  # per second, one measurement each
    take: Callable[[int], None]  # called on rank 0, returns when all links have the rate of that index
    traffic: Callable[[], Counters]  # what this host's interface has carried so far


def measure_as_rank(transport: Transport, spec: NetworkSpec, folder: Path) -> list[list[Sample]]:
    """Measure in this dedicated process; every rank returns the same, by rate."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=(folder / "torch").as_uri(),
        rank=transport.rank,
        world_size=transport.world_size,
        timeout=timedelta(seconds=transport.timeout),
    )
    group = torch.distributed.group.WORLD
    methods = [method_of(name, spec.model, transport, group) for name in spec.contestants()]
    rates = [parse_rate(rate) for rate in spec.rates]
    link = Link(rates, lambda index: ask_for_rate(folder, index), interface_traffic)
    samples = measure(transport, methods, spec.model, link, spec.seconds, teller(transport, folder / PROGRESS))
    torch.distributed.destroy_process_group()
    return samples


def measure(
    transport: Transport, methods: Sequence[Method], recipe: Model, link: Link, seconds: float, tell: Tell = silent
) -> list[list[Sample]]:
    """Measure every contestant for about `seconds` together at each rate; every rank returns the same.

    The ranks meet on `transport`, whatever the contestants use. Modules are warmed up before, on links as fast as the
    machine. Replicas that should be equal and are not are a `MurmuraError`.
    """
    found = []
    with contextlib.ExitStack() as closing:
        contestants = prepare(transport, methods, recipe, link.traffic)
        alone = []
        for each in contestants:
            closing.callback(each.close)
            each.counts_bursts = exchanges_in_background(each.name)
            each.batch = warm_up_steps(each.name)
            each.run_batch(0)
            each.batch = period(each.name)
            alone.append(slowest(transport, each.run_batch(0)[0]))
        shapes = [parameter.shape for parameter in contestants[0].module.parameters()]
        for index, rate in enumerate(link.rates_bytes):
            if transport.rank == 0:
                link.take(index)
            transport.barrier()
            for each, step_seconds in zip(contestants, alone, strict=True):
                sent = formula_bytes(each.name, shapes, transport.world_size)
                each.batch = steps_per_batch(each.name, step_seconds + sent / rate)
            found.append(take_turns(transport, contestants, seconds, tell, index, MIN_ROUNDS))
        for each in contestants:
            if stays_together(each.name):
                check_in_step(transport, each.module, each.name)
        transport.barrier()  # no rank may leave while a peer still needs it
    return found


def ask_for_rate(folder: Path, index: int) -> None:
    """Announce a new rate, and wait until the links have it."""
    ProgressFile(folder / PROGRESS)(Progress(index, 0.0))
    shaped = folder / f"shaped-{index}"
    deadline = time.monotonic() + SHAPING_SECONDS
    while not shaped.exists():
        if time.monotonic() > deadline:
            raise MurmuraError(
                f"rank 0 waited {SHAPING_SECONDS:.0f} s for links of another rate. "
                "Has the command that started it been ended?"
            )
        time.sleep(POLL_SECONDS)
