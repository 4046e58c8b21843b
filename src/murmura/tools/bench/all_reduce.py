"""The all-reduce benchmark: murmura and its peers on one set of rank processes, in one run."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from murmura import Transport
from murmura.errors import ConfigError
from murmura.tools import ranks
from murmura.tools.bench.all_reduce_contestants import MURMURA, Method, Peer, methods_of, prepare
from murmura.tools.bench.buffers import num_buffers, size_faults
from murmura.tools.bench.harness import Report, Sample, load, ratios, take_share_of_cores, take_turns
from murmura.tools.bench.mpiexec import find_mpiexec, run_under_mpiexec
from murmura.tools.bench.sizes import format_size
from murmura.tools.options import check_seconds, raise_faults
from murmura.tools.progress import PROGRESS, Progress, Tell, silent, teller, watching


@dataclass(frozen=True, kw_only=True)
class AllReduceSpec:
    """The specification of the all-reduce benchmark.

    Attributes:
        ranks: processes on this host.
        sizes_bytes: lengths of the message, each a multiple of 4 bytes.
        peers: who is measured beside murmura.
        seconds: how long to measure each size, all contestants together; a few rounds are measured in any case.
    """

    ranks: int = 2
    sizes_bytes: tuple[int, ...] = (4 * 2**10, 64 * 2**10, 2**20, 25 * 2**20, 100 * 2**20)
    peers: tuple[Peer, ...] = (Peer.GLOO,)
    seconds: float = 3.0

    def __post_init__(self) -> None:
        faults = []
        if self.ranks < 2:
            faults.append(f"{self.ranks} rank(s) have nobody to exchange with. Ask for 2 or more.")
        if not self.sizes_bytes:
            faults.append("there is no size to measure. Name at least one.")
        raise_faults([*faults, *size_faults(self.sizes_bytes), *check_seconds(self.seconds)])

    def needed_bytes(self, size_bytes: int) -> int:
        """About the memory that all ranks use together at one size: two pools, staging, the check of the sum."""
        return self.ranks * size_bytes * (2 * num_buffers(size_bytes) + 4)


def check_memory(spec: AllReduceSpec, available: int) -> None:
    """Raise a ConfigError if a size would not fit into the available memory."""
    for size in spec.sizes_bytes:
        needed = spec.needed_bytes(size)
        if needed > 0.8 * available:
            raise ConfigError(
                f"{format_size(size)} on {spec.ranks} ranks needs about {needed / 2**30:.1f} GiB of memory, but "
                f"{available / 2**30:.1f} GiB are available. Leave the size out, or take fewer ranks."
            )


@dataclass(frozen=True)
class Row:
    """One contestant at one size; benchmarks/README.md explains the fields."""

    size_bytes: int
    contestant: str
    microseconds: float
    quartiles: tuple[float, float]
    gb_per_s: float
    rounds: int
    batch: int
    ratio: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class AllReduceReport(Report[AllReduceSpec]):
    """The finished benchmark."""

    benchmark: ClassVar[str] = "all-reduce"

    rows: tuple[Row, ...]

    def row(self, size_bytes: int, contestant: str) -> Row:
        return next(row for row in self.rows if (row.size_bytes, row.contestant) == (size_bytes, contestant))

    def fields(self) -> dict[str, Any]:
        return {
            "ranks": self.spec.ranks,
            "operation": "sum",
            "dtype": "float32",
            "seconds_per_size": self.spec.seconds,
            "rows": [asdict(row) for row in self.rows],
        }


def run_all_reduce(spec: AllReduceSpec, on_progress: Tell = silent) -> AllReduceReport:
    """Measure `spec`. `on_progress` is called from a thread, a few times a second.

    Raises a ConfigError before anything is started if this machine cannot do it, another `MurmuraError` if the
    measurement fails or a contestant sums wrongly.
    """
    check_memory(spec, psutil.virtual_memory().available)
    with_mpi = Peer.MPICH in spec.peers
    if with_mpi:
        find_mpiexec()
    load_before = load()
    with tempfile.TemporaryDirectory(prefix="murmura-bench-") as name:
        folder = Path(name)
        with watching(folder / PROGRESS, on_progress):
            samples = (
                run_under_mpiexec(folder, spec.ranks, measure_as_rank, spec, folder)
                if with_mpi
                else ranks.run_here("the measurement", measure_as_rank, spec.ranks, spec, folder)
            )
    return report_of(spec, samples, load_before)


def report_of(spec: AllReduceSpec, samples: dict[int, list[Sample]], load_before: float) -> AllReduceReport:
    """Return the report of what was just measured on this machine, by size."""
    about = {each.contestant: each.about for of_size in samples.values() for each in of_size}
    rows = tuple(row for size, of_size in samples.items() for row in rows_of(size, of_size))
    return AllReduceReport(spec=spec, contestants=about, load_before=load_before, rows=rows)


def measure_as_rank(transport: Transport, spec: AllReduceSpec, folder: Path) -> dict[int, list[Sample]]:
    """Measure `spec` in this dedicated process; every rank returns the same."""
    take_share_of_cores(spec.ranks)
    gc.disable()
    methods = methods_of(spec.peers, transport, folder)
    return measure(transport, methods, spec.sizes_bytes, spec.seconds, teller(transport, folder / PROGRESS))


def measure(
    transport: Transport, methods: Sequence[Method], sizes_bytes: Sequence[int], seconds: float, tell: Tell = silent
) -> dict[int, list[Sample]]:
    """Measure every contestant at every size, about `seconds` a size; a wrong sum is a `MurmuraError`."""
    samples = {}
    for index, size in enumerate(sizes_bytes):
        tell(Progress(index, 0.0))
        samples[size] = take_turns(transport, prepare(transport, methods, size), seconds, tell, index)
    transport.barrier()  # no rank may leave while a peer still needs it
    return samples


def rows_of(size_bytes: int, samples: Sequence[Sample]) -> list[Row]:
    """The statistics of each sample of one size, and the ratios between murmura and its peers."""
    peers = [each for each in samples if each.contestant not in MURMURA]
    return [
        Row(
            size_bytes=size_bytes,
            contestant=each.contestant,
            microseconds=each.seconds * 1e6,
            quartiles=each.quartiles(1e6),
            gb_per_s=size_bytes / each.seconds / 1e9,
            rounds=each.rounds,
            batch=each.batch,
            ratio=ratios(peers, each) if each.contestant in MURMURA else {},
        )
        for each in samples
    ]
