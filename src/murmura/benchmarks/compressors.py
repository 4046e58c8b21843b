"""What compressing costs, beside a copy of the same tensor; the measurement and its JSON form.

benchmark           "compressors"
schema_version      1; grows when a field changes its meaning
date, command       when the measurement ended (ISO 8601, UTC), and what repeats it
machine             cpu (model), cores, system, python, torch, murmura
dtype               "float32"
seconds             as ordered, for each device
devices             name: what it is
rows                one for each device, compressor and operation:
    device          "cpu" (one thread) or "cuda"
    compressor      "copy", or the compressor as Python writes it
    operation       "copy", "encode", "decode", "decode-add"
    size_bytes      length of the tensor
    least_bytes     what must be read and written at least
    microseconds    the median over all rounds
    quartiles       [first, third] of the same
    times_copy      this median / that of the copy
    of_copy_bandwidth  least_bytes / median, over the same of the copy
    rounds          how often it was measured
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import torch
from torch import Tensor

from murmura.benchmarks.progress import Progress, silent
from murmura.benchmarks.report import Machine
from murmura.benchmarks.sizes import format_size
from murmura.benchmarks.spec import ELEMENT_BYTES, num_buffers
from murmura.compressors import Cast, Compressor, MinMaxUInt8
from murmura.errors import ConfigError, MurmuraError

SCHEMA_VERSION = 1
COPY = "copy"
COMPRESSORS: tuple[Compressor, ...] = (MinMaxUInt8(), Cast(torch.bfloat16))
LEAST_ROUNDS = 5
CUDA_BATCH = 10


@dataclass(frozen=True, kw_only=True)
class CompressorsSpec:
    """An order for the benchmark: lengths of the tensors, and seconds for each device."""

    size_bytes: int = 25 * 2**20
    cuda_size_bytes: int = 400 * 2**20
    seconds: float = 3.0

    def __post_init__(self) -> None:
        faults = [
            f"{size} bytes are no whole number of float32 elements. Take a multiple of {ELEMENT_BYTES}, at least that."
            for size in (self.size_bytes, self.cuda_size_bytes)
            if size < ELEMENT_BYTES or size % ELEMENT_BYTES
        ]
        if not 0 < self.seconds < math.inf:
            faults.append(f"{self.seconds} is not a time to measure for. Give seconds above 0.")
        if faults:
            raise ConfigError("\n".join(faults))

    def devices(self) -> dict[str, int]:
        """The devices that are here, each with the length of its tensors."""
        return {"cpu": self.size_bytes} | ({"cuda": self.cuda_size_bytes} if torch.cuda.is_available() else {})

    def command(self) -> str:
        """The command that gives this order."""
        size, cuda_size = (format_size(each).replace(" ", "") for each in (self.size_bytes, self.cuda_size_bytes))
        return f"murmura bench compressors --size {size} --cuda-size {cuda_size} --seconds {self.seconds:g}"


@dataclass(frozen=True)
class Row:
    """One operation; the module's docstring explains the fields."""

    device: str
    compressor: str
    operation: str
    size_bytes: int
    least_bytes: int
    microseconds: float
    quartiles: tuple[float, float]
    times_copy: float
    of_copy_bandwidth: float
    rounds: int


@dataclass(frozen=True)
class CompressorsReport:
    """A finished benchmark."""

    spec: CompressorsSpec
    date: str
    machine: Machine
    devices: dict[str, str]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """The text of a JSON file, as the module's docstring describes it."""
        fields = {
            "benchmark": "compressors",
            "schema_version": SCHEMA_VERSION,
            "date": self.date,
            "command": self.spec.command(),
            "machine": asdict(self.machine),
            "dtype": "float32",
            "seconds": self.spec.seconds,
            "devices": self.devices,
            "rows": [asdict(row) for row in self.rows],
        }
        return json.dumps(fields, indent=2) + "\n"


def run_compressors(spec: CompressorsSpec, on_progress: Callable[[Progress], None] = silent) -> CompressorsReport:
    """Measure `spec`; a `MurmuraError` if a compressor decodes wrongly."""
    rows: list[Row] = []
    for index, (device, size_bytes) in enumerate(spec.devices().items()):
        with one_thread():
            rows += measure(torch.device(device), size_bytes, spec.seconds)
        on_progress(Progress(index, size_bytes, 1.0, rows[-1].rounds))
    names = {name: torch.cuda.get_device_name() if name == "cuda" else "one thread" for name in spec.devices()}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return CompressorsReport(spec, date, Machine.here(), names, tuple(rows))


@dataclass(frozen=True)
class Job:
    """An operation on the buffers of a turn, which is a number from 0."""

    compressor: str
    operation: str
    least_bytes: int
    run: Callable[[int], None]


def measure(device: torch.device, size_bytes: int, seconds: float) -> list[Row]:
    """The operations take turns for `seconds`, on buffers that take turns too."""
    buffers = num_buffers(size_bytes)
    sources = [torch.randn(size_bytes // ELEMENT_BYTES, device=device) for _ in range(buffers)]
    targets = [torch.zeros_like(source) for source in sources]
    jobs = list(jobs_on(sources, targets))
    time_it = time_on_cuda if device.type == "cuda" else time_on_cpu
    samples: list[list[float]] = [[] for _ in jobs]
    for turn in range(2 * buffers):  # compiles kernels and touches pages
        for job in jobs:
            job.run(turn % buffers)
    deadline = time.monotonic() + seconds
    turn = 0
    while turn < LEAST_ROUNDS or time.monotonic() < deadline:
        for place, (job, sample) in enumerate(zip(jobs, samples, strict=True)):
            sample.append(time_it(job.run, [(turn + place + each) % buffers for each in range(CUDA_BATCH)]))
        turn += 1
    rows = []
    copy, copy_bytes = statistics.median(samples[0]), jobs[0].least_bytes
    for job, sample in zip(jobs, samples, strict=True):
        first, median, third = statistics.quantiles(sample, n=4, method="inclusive")
        row = Row(
            device=device.type,
            compressor=job.compressor,
            operation=job.operation,
            size_bytes=size_bytes,
            least_bytes=job.least_bytes,
            microseconds=median * 1e6,
            quartiles=(first * 1e6, third * 1e6),
            times_copy=median / copy,
            of_copy_bandwidth=(job.least_bytes / median) / (copy_bytes / copy),
            rounds=len(sample),
        )
        rows.append(row)
    return rows


def jobs_on(sources: list[Tensor], targets: list[Tensor]) -> Iterator[Job]:
    """The copy, then the operations of each compressor, whose payloads are right when they are first decoded."""
    numel, dtype = sources[0].numel(), sources[0].dtype
    size_bytes = numel * ELEMENT_BYTES

    def copy(turn: int) -> None:
        targets[turn].copy_(sources[turn])

    yield Job(COPY, COPY, 2 * size_bytes, copy)
    for compressor in COMPRESSORS:
        length = compressor.payload_bytes(numel, dtype)
        payloads = [torch.empty(length, dtype=torch.uint8, device=source.device) for source in sources]
        check(compressor, sources, payloads, targets)
        work = _operations(compressor, sources, payloads, targets)
        least = {"encode": size_bytes + length, "decode": length + size_bytes, "decode-add": length + 2 * size_bytes}
        for operation, run in work.items():
            yield Job(repr(compressor), operation, least[operation], run)


def _operations(
    compressor: Compressor, sources: list[Tensor], payloads: list[Tensor], targets: list[Tensor]
) -> dict[str, Callable[[int], None]]:
    return {
        "encode": lambda turn: compressor.compress(sources[turn], payloads[turn]),
        "decode": lambda turn: compressor.decompress(payloads[turn], targets[turn]),
        "decode-add": lambda turn: compressor.decompress_add(payloads[turn], targets[turn]),
    }


def check(compressor: Compressor, sources: list[Tensor], payloads: list[Tensor], targets: list[Tensor]) -> None:
    """Encode everything; a MurmuraError if something does not come back near enough."""
    for source, payload, target in zip(sources, payloads, targets, strict=True):
        compressor.compress(source, payload)
        compressor.decompress(payload, target)
        if float((target - source).abs().max()) > 0.05:  # of values that reach to about 5
            raise MurmuraError(
                f"{compressor!r} decoded wrongly on {source.device}; the measurement would be of no use."
            )


def time_on_cpu(run: Callable[[int], None], turns: Sequence[int]) -> float:
    begin = time.perf_counter()
    run(turns[0])
    return time.perf_counter() - begin


def time_on_cuda(run: Callable[[int], None], turns: Sequence[int]) -> float:
    """Seconds of one of several, queued while the device is busy with another: it never waits for the host."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    run(turns[0])
    begin.record()
    for turn in turns:
        run(turn)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / len(turns)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one core meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
