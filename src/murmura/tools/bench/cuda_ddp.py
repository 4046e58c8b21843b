"""The DDP benchmark on a GPU: training steps of murmura on NCCL beside torch's DDP, several ranks on one GPU.

NCCL goes through loopback sockets there, so the figures compare schedules and bytes; they say nothing of several GPUs.
Its fields in JSON:

label               how the ranks share the GPU
device              the name of the GPU
models              by name: about, parameters, parameter_tensors
steps               one row for each number of ranks, model and contestant:
    model, ranks, contestant
    milliseconds    of one step that begins when all is idle, until the GPU is done: the slowest rank's median of a
                    turn, or mean for algorithms that do not communicate in every step; the median over the turns
    host_milliseconds  until the host is free: forward, backward and step have returned
    loop_milliseconds  of one step of many in a row
    extra_mib       GPU memory of a rank at the peak, beyond the bare module's
    ratio           torch's DDP's milliseconds / these of the same turn, the median over the turns: above 1, faster than
                    torch's DDP
    ratio_range     the least and the greatest of them
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
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
from murmura.tools.bench.steps import nothing
from murmura.tools.one_gpu import LABEL, OneGPU
from murmura.tools.options import check_seconds, raise_faults
from murmura.tools.progress import Progress, Tell, silent

BARE, TORCH, TORCH_BF16, MURMURA, CAST = "bare", "torch-ddp", "torch-ddp-bf16", "murmura", "cast-bf16"
WARM_STEPS = 5
MIN_STEPS, MAX_STEPS = 5, 200
TURNS = 5
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


class Turn(NamedTuple):
    """What one turn of a contestant took: seconds of a step, of the host's part and of a step in a loop, and MiB."""

    step: float
    host: float
    loop: float
    memory: float


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
    ratio_range: tuple[float, float] | None = None


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
        rows += rows_of(model, ranks, {name: [Turn(*each) for each in turns] for name, turns in found.items()})
        on_progress(Progress(stage, 1.0, len(found)))
    about = {each: _about(each) for each in spec.contestants}
    device = torch.cuda.get_device_name()
    return CudaDDPReport(
        spec=spec, contestants=about, load_before=load_before, steps=tuple(rows), device=device, label=label
    )


def rows_of(model: str, ranks: int, found: dict[str, list[Turn]]) -> list[CudaStep]:
    """A row for each contestant, whose turns these are, as the slowest rank had them."""
    return [_row(model, ranks, name, turns, found[BARE], found.get(TORCH)) for name, turns in found.items()]


def _row(
    model: str, ranks: int, name: str, turns: list[Turn], bare: list[Turn], reference: list[Turn] | None
) -> CudaStep:
    step, host, loop = (statistics.median(each[figure] for each in turns) * 1e3 for figure in range(3))
    # Later turns may find memory that torch's DDP frees when another one is made.
    row = CudaStep(model, ranks, name, step, host, loop, extra_mib=turns[0].memory - bare[0].memory)
    if reference is None:
        return row
    ratios = [theirs.step / own.step for theirs, own in zip(reference, turns, strict=True)]
    return replace(row, ratio=statistics.median(ratios), ratio_range=(min(ratios), max(ratios)))


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
) -> dict[str, list[list[float]]]:
    """The figures of each contestant's turns, each of the slowest rank.

    Contestants take turns, forwards and backwards: what a machine does changes in the time that one of them takes.
    """
    recipe, between = CUDA_MODELS[model], transport.host_channel("between steps")
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for turn in range(TURNS):
        for name in contestants if turn % 2 == 0 else reversed(contestants):
            turns[name].append(_measure(transport, between, recipe, name, seconds / TURNS, folder))
    figures = torch.tensor([turns[name] for name in contestants], dtype=torch.float64)
    between.all_reduce(figures, "max")
    between.close()
    return dict(zip(contestants, figures.tolist(), strict=True))


def _measure(
    transport: Transport, between: Transport, recipe: CudaModel, name: str, seconds: float, folder: str
) -> Turn:
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
    middle = statistics.fmean if period > 1 else statistics.median
    return Turn(middle(whole), middle(host), loop, memory)


def _count(transport: Transport, seconds: float, step_seconds: float) -> int:
    """How many steps to measure, the same on all ranks."""
    number = torch.tensor([max(MIN_STEPS, min(MAX_STEPS, int(seconds / step_seconds)))])
    transport.all_reduce(number, "min")
    return int(number)


def _wrapped(transport: Transport, module: nn.Module, name: str, folder: str) -> tuple[nn.Module, Callable[[], None]]:
    if name == BARE:
        return module, nothing
    if name in (TORCH, TORCH_BF16):
        _join_default_group(transport.rank, transport.world_size, folder)
        ddp = nn.parallel.DistributedDataParallel(module, device_ids=[0], gradient_as_bucket_view=True)
        if name == TORCH_BF16:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

            ddp.register_comm_hook(None, bf16_compress_hook)
        return ddp, nothing
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
