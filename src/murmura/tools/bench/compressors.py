"""The benchmark of compressors: the time of each operation, compared with a copy of the same tensor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from murmura import InProcessTransport
from murmura.compressors import Compressor, compressor_named
from murmura.compressors.base import ENCODABLE
from murmura.errors import MurmuraError
from murmura.tools.bench.buffers import num_buffers, size_faults
from murmura.tools.bench.harness import Contestant, Report, load, take_turns
from murmura.tools.options import check_seconds, raise_faults
from murmura.tools.progress import Progress, Tell, silent

COPY = "copy"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ENCODABLE}
CUDA_BATCH = 10


@dataclass(frozen=True, kw_only=True)
class CompressorsSpec:
    """The specification of the benchmark: which, by name; lengths of the tensors, and seconds for each device."""

    compressors: tuple[str, ...] = ("uint8", "bf16", "uint4")
    dtype: str = "float32"
    size_bytes: int = 25 * 2**20
    cuda_size_bytes: int = 400 * 2**20
    seconds: float = 3.0

    def __post_init__(self) -> None:
        sizes = (self.size_bytes, self.cuda_size_bytes)
        raise_faults([*size_faults(sizes, self.dtype, DTYPES[self.dtype].itemsize), *check_seconds(self.seconds)])

    def devices(self) -> dict[str, int]:
        """The devices that are here, each with the length of its tensors."""
        return {"cpu": self.size_bytes} | ({"cuda": self.cuda_size_bytes} if torch.cuda.is_available() else {})


@dataclass(frozen=True)
class Row:
    """One operation; benchmarks/README.md explains the fields."""

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


@dataclass(frozen=True, kw_only=True)
class CompressorsReport(Report[CompressorsSpec]):
    """The finished benchmark."""

    benchmark: ClassVar[str] = "compressors"
    schema_version: ClassVar[int] = 2

    devices: dict[str, str]
    rows: tuple[Row, ...]

    def fields(self) -> dict[str, Any]:
        return {
            "dtype": self.spec.dtype,
            "seconds": self.spec.seconds,
            "devices": self.devices,
            "rows": [asdict(row) for row in self.rows],
        }


def run_compressors(spec: CompressorsSpec, on_progress: Tell = silent) -> CompressorsReport:
    """Measure `spec`; a `MurmuraError` if a compressor decodes wrongly."""
    load_before = load()
    rows: list[Row] = []
    for index, (device, size_bytes) in enumerate(spec.devices().items()):
        with one_thread():
            rows += measure(torch.device(device), size_bytes, spec)
        on_progress(Progress(index, 1.0, rows[-1].rounds))
    names = {name: torch.cuda.get_device_name() if name == "cuda" else "one thread" for name in spec.devices()}
    contestants = {COPY: "Tensor.copy_"} | {name: repr(compressor_named(name)) for name in spec.compressors}
    return CompressorsReport(
        spec=spec, contestants=contestants, load_before=load_before, devices=names, rows=tuple(rows)
    )


class Operation(Contestant):
    """An operation on buffers that take turns; `run` is given the index of a buffer."""

    def __init__(
        self, compressor: str, operation: str, least_bytes: int, run: Callable[[int], None], buffers: Sequence[Tensor]
    ) -> None:
        super().__init__(f"{compressor} {operation}", compressor)
        self.compressor = compressor
        self.operation = operation
        self.least_bytes = least_bytes
        self._run = run
        self._num_buffers = len(buffers)
        self._time = time_on_cuda if buffers[0].is_cuda else time_on_cpu

    def run_batch(self, number: int) -> list[float]:
        return [self._time(self._run, [(number + each) % self._num_buffers for each in range(CUDA_BATCH)])]


def measure(device: torch.device, size_bytes: int, spec: CompressorsSpec) -> list[Row]:
    """The operations take turns for `spec.seconds`, on buffers that take turns too."""
    buffers = num_buffers(size_bytes)
    dtype = DTYPES[spec.dtype]
    sources = [torch.randn(size_bytes // dtype.itemsize, device=device).to(dtype) for _ in range(buffers)]
    targets = [torch.zeros_like(source) for source in sources]
    operations = list(operations_on(spec.compressors, sources, targets))
    for turn in range(2 * buffers):  # compiles kernels and touches pages
        for each in operations:
            each.run_batch(turn)
    (alone,) = InProcessTransport.create_group(1)
    with alone:
        samples = take_turns(alone, operations, spec.seconds)
    copy = samples[0].seconds
    return [
        Row(
            device=device.type,
            compressor=each.compressor,
            operation=each.operation,
            size_bytes=size_bytes,
            least_bytes=each.least_bytes,
            microseconds=sample.seconds * 1e6,
            quartiles=sample.quartiles(1e6),
            times_copy=sample.seconds / copy,
            of_copy_bandwidth=(each.least_bytes / sample.seconds) / (operations[0].least_bytes / copy),
            rounds=sample.rounds,
        )
        for each, sample in zip(operations, samples, strict=True)
    ]


def operations_on(names: Sequence[str], sources: list[Tensor], targets: list[Tensor]) -> Iterator[Operation]:
    """The copy, then the operations of each compressor, whose payloads are right when they are first decoded."""
    numel, dtype = sources[0].numel(), sources[0].dtype
    size_bytes = sources[0].nbytes

    def copy(turn: int) -> None:
        targets[turn].copy_(sources[turn])

    yield Operation(COPY, COPY, 2 * size_bytes, copy, sources)
    for name in names:
        compressors = [compressor_named(name).for_bucket() for _ in sources]  # each carries what it lost of its own
        length = compressors[0].payload_bytes(numel, dtype)
        payloads = [torch.empty(length, dtype=torch.uint8, device=source.device) for source in sources]
        check(name, compressors, sources, payloads, targets)
        kept = 0 if compressors[0].residual is None else 2 * size_bytes
        least = {"encode": size_bytes + length + kept, "decode": length + size_bytes}
        least["decode-add"] = least["decode"] + size_bytes
        for operation, run in _operations(compressors, sources, payloads, targets).items():
            yield Operation(name, operation, least[operation], run, sources)


def _operations(
    compressors: list[Compressor], sources: list[Tensor], payloads: list[Tensor], targets: list[Tensor]
) -> dict[str, Callable[[int], None]]:
    return {
        "encode": lambda turn: compressors[turn].compress(sources[turn], payloads[turn]),
        "decode": lambda turn: compressors[turn].decompress(payloads[turn], targets[turn]),
        "decode-add": lambda turn: compressors[turn].decompress_add(payloads[turn], targets[turn]),
    }


def check(
    name: str, compressors: list[Compressor], sources: list[Tensor], payloads: list[Tensor], targets: list[Tensor]
) -> None:
    """Encode everything; a `MurmuraError` if a decoded tensor is no nearer to its source than zeros are."""
    for compressor, source, payload, target in zip(compressors, sources, payloads, targets, strict=True):
        compressor.compress(source, payload)
        compressor.decompress(payload, target)
        if not bool((target - source).float().norm() < source.float().norm()):
            raise MurmuraError(f"{name} decoded wrongly on {source.device}; the measurement would be of no use.")


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
    """Limit torch to one thread while the block runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
