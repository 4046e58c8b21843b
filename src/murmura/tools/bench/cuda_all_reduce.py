"""The all-reduce benchmark on a GPU: murmura on NCCL beside NCCL through torch, several ranks on one GPU.

A time is from the call until the device is done, so it shows what murmura adds to NCCL. NCCL goes through loopback
sockets here; the times say nothing of several GPUs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor

from murmura import MurmuraError, Transport, __version__
from murmura.errors import ConfigError
from murmura.tools.bench.all_reduce import AllReduceReport, AllReduceSpec, report_of
from murmura.tools.bench.all_reduce_contestants import ANY_TENSOR, BARRIERS
from murmura.tools.bench.buffers import ELEMENT_BYTES, most_per_batch
from murmura.tools.bench.harness import Contestant, Sample, load, slowest, take_turns
from murmura.tools.experiments.process_groups import nccl_backend
from murmura.tools.one_gpu import OneGPU
from murmura.tools.progress import Progress, Tell, silent

NCCL = "nccl"
BATCH_SECONDS = 0.05
LIMIT_SECONDS = 600.0


def run_cuda_all_reduce(spec: AllReduceSpec, on_progress: Tell = silent) -> AllReduceReport:
    """Measure `spec`, whose peers are left out: NCCL is the peer."""
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine has no CUDA device.")
    load_before = load()
    samples: dict[int, list[Sample]] = {}
    with OneGPU(spec.ranks) as gpu, tempfile.TemporaryDirectory(prefix="murmura-bench-") as folder:
        for index, size in enumerate(spec.sizes_bytes):
            on_progress(Progress(index, 0.0))
            store_file = Path(folder) / f"nccl-{index}"
            samples[size] = gpu.run(measure, size, spec.seconds, gpu.label, store_file, limit=LIMIT_SECONDS)[0]
            on_progress(Progress(index, 1.0, samples[size][0].rounds))
    return report_of(spec, samples, load_before)


def measure(transport: Transport, size_bytes: int, seconds: float, label: str, store_file: Path) -> list[Sample]:
    """One size, on every rank."""
    group, sum_of = nccl_backend(transport, store_file), torch.distributed.AllreduceOptions()
    buffer = torch.zeros(size_bytes // ELEMENT_BYTES, device="cuda")

    def by_nccl() -> None:
        group.allreduce([buffer], sum_of).wait()

    def by_murmura() -> None:
        transport.all_reduce(buffer)

    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    contestants = [
        CudaAllReduce(ANY_TENSOR, f"murmura {__version__} on NCCL {version}, {label}", transport, buffer, by_murmura),
        CudaAllReduce(NCCL, f"NCCL {version} through torch {torch.__version__}, {label}", transport, buffer, by_nccl),
    ]
    for each in contestants:
        each.warm_up()
    samples = take_turns(transport, contestants, seconds)
    torch.cuda.synchronize()
    transport.barrier()
    group.shutdown()
    return samples


class CudaAllReduce(Contestant):
    """One way to all-reduce a buffer on a GPU."""

    def __init__(self, name: str, about: str, transport: Transport, buffer: Tensor, call: Callable[[], None]) -> None:
        super().__init__(name, about)
        self._transport = transport
        self._buffer = buffer
        self._call = call

    def warm_up(self) -> None:
        """Check a sum, and find out how many make a batch."""
        size = self._transport.world_size
        self._buffer.fill_(self._transport.rank + 1)
        self._call()
        if not bool((self._buffer == size * (size + 1) // 2).all()):
            raise MurmuraError(f"{self.name} sums wrongly on {size} ranks. There is nothing to measure.")
        trials = [self.run_batch(number)[0] for number in range(3)]
        seconds = slowest(self._transport, min(trials))
        self.batch = max(1, min(most_per_batch(self._buffer.nbytes), int(BATCH_SECONDS / seconds)))

    def run_batch(self, number: int) -> Sequence[float]:
        self._buffer.zero_()  # or sums of sums would overflow
        torch.cuda.synchronize()
        for _ in range(BARRIERS):
            self._transport.barrier()
        began = time.perf_counter()
        for _ in range(self.batch):
            self._call()
        torch.cuda.synchronize()
        return [(time.perf_counter() - began) / self.batch]
