"""The DDP benchmark on a GPU: training steps of murmura on NCCL beside torch's DDP, several ranks on one GPU.

NCCL goes through loopback sockets there, so the figures compare schedules and bytes; they say nothing of several GPUs.
Its fields in JSON:

label               how the ranks share the GPU
device              the name of the GPU
models              by name: about, parameters, parameter_tensors
steps               one row for each number of ranks, model and contestant:
    model, ranks, contestant
    milliseconds    of one step that begins when all is idle, until the GPU is done: the median over three turns of
                    the slowest rank, or the mean for algorithms that do not communicate in every step
    host_milliseconds  until the host is free: forward, backward and step have returned
    loop_milliseconds  of one step of many in a row
    extra_mib       GPU memory of a rank at the peak, beyond the bare module's
    ratio           torch's DDP's milliseconds / these: above 1, faster than torch's DDP
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from murmura import DDP, Cast, GradientAllReduceAlgorithm, Transport
from murmura.algorithms import Algorithm, algorithm_named
from murmura.tools.bench.cuda_models import CUDA_MODELS, CudaModel
from murmura.tools.bench.harness import Report, load
from murmura.tools.one_gpu import LABEL, OneGPU
from murmura.tools.options import check_seconds, raise_faults
from murmura.tools.progress import Progress, Tell, silent

BARE, TORCH, TORCH_BF16, MURMURA, CAST = "bare", "torch-ddp", "torch-ddp-bf16", "murmura", "cast-bf16"
WARM_STEPS = 5
MIN_STEPS, MAX_STEPS = 5, 200
TURNS = 3
WAIT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class CudaDDPSpec:
    """The specification: `seconds` is how long each contestant is measured, with each model and number of ranks."""

    ranks: tuple[int, ...] = (2, 4)
    models: tuple[str, ...] = tuple(CUDA_MODELS)
    algorithms: tuple[str, ...] = ()
    seconds: float = 4.0

    def __post_init__(self) -> None:
        faults = []
        if not self.ranks or not self.models:
            faults.append("there is nothing to measure. Name at least one number of ranks and one model.")
        if min(self.ranks, default=2) < 2:
            faults.append("one rank has nothing to exchange. Name numbers of ranks from 2 on.")
        if not torch.cuda.is_available():
            faults.append("this machine has no CUDA device.")
        raise_faults([*faults, *check_seconds(self.seconds)])

    @property
    def contestants(self) -> list[str]:
        """In the order they are measured."""
        both = [TORCH, TORCH_BF16] if self.algorithms else [TORCH]
        return [BARE, *both, MURMURA, *self.algorithms]

    def stages(self) -> list[str]:
        return [f"{model}, {ranks} ranks" for ranks in self.ranks for model in self.models]


@dataclass(frozen=True)
class CudaStep:
    """One contestant; the module's docstring explains the fields."""

    model: str
    ranks: int
    contestant: str
    milliseconds: float
    host_milliseconds: float
    loop_milliseconds: float
    extra_mib: float
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class CudaDDPReport(Report[CudaDDPSpec]):
    """The finished benchmark."""

    benchmark: ClassVar[str] = "ddp-cuda"

    steps: tuple[CudaStep, ...]
    device: str
    label: str = field(default=LABEL)

    def fields(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "device": self.device,
            "models": {name: CUDA_MODELS[name].described() for name in self.spec.models},
            "steps": [asdict(row) for row in self.steps],
        }


def run_cuda_ddp(spec: CudaDDPSpec, on_progress: Tell = silent) -> CudaDDPReport:
    """Measure `spec`, with a world of ranks on one GPU for each model and number of them.

    A world for each, because torch's DDP does not free its buckets before another one is made.
    """
    load_before, rows, label = load(), [], LABEL
    for stage, (ranks, model) in enumerate(itertools.product(spec.ranks, spec.models)):
        on_progress(Progress(stage, 0.0))
        with OneGPU(ranks, timeout=WAIT_SECONDS) as gpu:
            label = gpu.label
            found = gpu.run(measure_model, model, spec.contestants, spec.seconds, str(gpu.folder), limit=600)[0]
        rows += _rows(model, ranks, found)
        on_progress(Progress(stage, 1.0, len(found)))
    about = {each: _about(each) for each in spec.contestants}
    device = torch.cuda.get_device_name()
    return CudaDDPReport(
        spec=spec, contestants=about, load_before=load_before, steps=tuple(rows), device=device, label=label
    )


def _rows(model: str, ranks: int, found: dict[str, list[float]]) -> list[CudaStep]:
    bare, reference = found[BARE], found.get(TORCH)
    return [
        CudaStep(
            model,
            ranks,
            name,
            milliseconds=step * 1e3,
            host_milliseconds=host * 1e3,
            loop_milliseconds=loop * 1e3,
            extra_mib=memory - bare[3],
            ratio=None if reference is None else reference[0] / step,
        )
        for name, (step, host, loop, memory) in found.items()
    ]


def _about(name: str) -> str:
    if name == BARE:
        return "the module alone, no communication"
    if name in (TORCH, TORCH_BF16):
        hook = ", bf16_compress_hook" if name == TORCH_BF16 else ""
        return f"DistributedDataParallel of torch {torch.__version__}, gradient_as_bucket_view=True{hook}, NCCL"
    return f"murmura's DDP, {'gradient_allreduce' if name == MURMURA else name}, NCCL"


# On the ranks


def measure_model(
    transport: Transport, model: str, contestants: list[str], seconds: float, folder: str
) -> dict[str, list[float]]:
    """Seconds of a step, of the host's part and of a step in a loop, and MiB at the peak; of the slowest rank.

    Contestants take turns, forwards and backwards: what a machine does changes in the time that one of them takes.
    """
    recipe, between = CUDA_MODELS[model], transport.host_channel("between steps")
    turns: dict[str, list[_Turn]] = {name: [] for name in contestants}
    for turn in range(TURNS):
        for name in contestants if turn % 2 == 0 else reversed(contestants):
            turns[name].append(_measure(transport, between, recipe, name, seconds / TURNS, folder))
    between.close()
    return {name: _slowest(transport, name, turns[name]) for name in contestants}


class _Turn(NamedTuple):
    """What this rank measured of a contestant in one turn: seconds of steps, and MiB."""

    whole: list[float]
    host: list[float]
    loop: float
    memory: float


def _slowest(transport: Transport, name: str, turns: list[_Turn]) -> list[float]:
    """The figures of a contestant, each that of the slowest rank."""
    middle = statistics.fmean if _algorithm(name).period > 1 else statistics.median
    figures = torch.tensor(
        [
            statistics.median(middle(turn.whole) for turn in turns),
            statistics.median(middle(turn.host) for turn in turns),
            statistics.median(turn.loop for turn in turns),
            turns[0].memory,  # later ones may find memory that torch's DDP frees when another one is made
        ],
        dtype=torch.float64,
    )
    transport.all_reduce(figures, "max")
    slowest: list[float] = figures.tolist()
    return slowest


def _measure(
    transport: Transport, between: Transport, recipe: CudaModel, name: str, seconds: float, folder: str
) -> _Turn:
    """One turn; ranks meet `between` steps without the GPU, on which murmura would watch what it does."""
    gc.collect()
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    module = recipe.build()
    torch.manual_seed(transport.rank)
    data = recipe.data()
    wrapped, close = _wrapped(transport, module, name, folder)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        recipe.loss(wrapped, data).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for _ in range(WARM_STEPS):
        step()
    torch.cuda.reset_peak_memory_stats()
    whole: list[float] = []
    host: list[float] = []
    number, period = MAX_STEPS, _algorithm(name).period
    while len(whole) < number:
        torch.cuda.synchronize()
        between.barrier()
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - began)
        if len(whole) == MIN_STEPS:
            number = _count(between, seconds / 2, statistics.median(whole))
            number = -(-number // period) * period
    torch.cuda.synchronize()
    between.barrier()
    began = time.perf_counter()
    for _ in range(number):
        step()
    torch.cuda.synchronize()
    loop = (time.perf_counter() - began) / number
    memory = (torch.cuda.max_memory_allocated() - base) / 2**20
    close()
    return _Turn(whole, host, loop, memory)


def _count(transport: Transport, seconds: float, step_seconds: float) -> int:
    """How many steps to measure, the same on all ranks."""
    number = torch.tensor([max(MIN_STEPS, min(MAX_STEPS, int(seconds / step_seconds)))])
    transport.all_reduce(number, "min")
    return int(number)


def _wrapped(transport: Transport, module: nn.Module, name: str, folder: str) -> tuple[nn.Module, Callable[[], None]]:
    if name == BARE:
        return module, _nothing
    if name in (TORCH, TORCH_BF16):
        _join_default_group(transport.rank, transport.world_size, folder)
        ddp = nn.parallel.DistributedDataParallel(module, device_ids=[0], gradient_as_bucket_view=True)
        if name == TORCH_BF16:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            ddp.register_comm_hook(None, bf16_compress_hook)
        return ddp, _nothing
    own = DDP(module, transport, algorithm=_algorithm(name))
    return own, own.close


def _algorithm(name: str) -> Algorithm:
    """The algorithm of a contestant; those that are not murmura communicate as plain gradient all-reduce does."""
    if name in (BARE, TORCH, TORCH_BF16, MURMURA):
        return GradientAllReduceAlgorithm()
    return GradientAllReduceAlgorithm(compressor=Cast(torch.bfloat16)) if name == CAST else algorithm_named(name)


@functools.cache
def _join_default_group(rank: int, world_size: int, folder: str) -> None:
    """The group of torch's DDP, once in a process."""
    store = dist.FileStore(str(Path(folder) / f"default-group-{world_size}"), world_size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=WAIT_SECONDS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=limit)


def _nothing() -> None:
    """What closing a contestant that holds nothing takes."""
