"""Who competes on a slow link: every algorithm, torch's DDP with and without its hooks, and nobody's communication.

Each contestant wraps a module; it also knows, by a formula, how many bytes a rank must send for a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from murmura import (
    DDP,
    Algorithm,
    AsyncModelAverageAlgorithm,
    GradientAllReduceAlgorithm,
    QAdamOptimizer,
    Transport,
    __version__,
)
from murmura.algorithms import algorithm_named
from murmura.algorithms.names import LOCAL_STEPS
from murmura.benchmarks.ddp_contestants import Wrapped
from murmura.benchmarks.models import Model
from murmura.benchmarks.network_spec import NetworkPeer, NetworkSpec
from murmura.experiments.traffic import bytes_per_step

TORCH_DDP, FP16, POWER_SGD = "torch-ddp", "torch-ddp fp16", "torch-ddp powersgd"
BARE = "no communication"
LOCAL = ("local_sgd", "diloco", "async")  # these communicate once in LOCAL_STEPS steps
GOSSIP = ("decentralized", "shift_one", "low_precision_decentralized", "async")  # replicas differ after a step
QADAM_WARM_UP = 2
POWER_SGD_START = 2  # steps without compression, the least that torch takes


def contestant_names(spec: NetworkSpec) -> list[str]:
    """Who competes, in the order of the table."""
    torchs = [TORCH_DDP, FP16, POWER_SGD] if NetworkPeer.TORCH_DDP in spec.peers else []
    return [*torchs, *spec.algorithms, BARE]


def period(name: str) -> int:
    """After how many steps a contestant has done all it does: steps are timed in multiples of it."""
    return LOCAL_STEPS if name in LOCAL else 1


def warm_up_steps(name: str) -> int:
    """How many steps it takes before all are alike: buckets are planned, warm-ups over."""
    return max(period(name), POWER_SGD_START + 1, QADAM_WARM_UP + 1)


def stays_together(name: str) -> bool:
    """Whether all replicas are equal after a period."""
    return name != BARE and name not in GOSSIP


def formula_bytes(name: str, shapes: Sequence[Sequence[int]], num_ranks: int) -> float:
    """What a rank must send for a step, the mean over ranks and a period: parameters of these `shapes`, float32.

    torch's DDP all-reduces all elements, in fp16 half of the bytes, in PowerSGD of rank 1 h + w elements for a matrix
    of h x w.
    """
    numel = sum(_product(shape) for shape in shapes)
    all_reduce = GradientAllReduceAlgorithm()
    if name == BARE:
        return 0.0
    if name == POWER_SGD:
        return bytes_per_step(all_reduce, sum(_low_rank(shape) for shape in shapes), num_ranks)
    if name == FP16:
        return bytes_per_step(all_reduce, numel, num_ranks) / 2
    return bytes_per_step(all_reduce if name == TORCH_DDP else _algorithm(name), numel, num_ranks)


def _low_rank(shape: Sequence[int]) -> int:
    """What PowerSGD of rank 1 sends for a tensor: torch compresses a matrix if that saves more than a half."""
    numel = _product(shape)
    height, width = (shape[0], numel // shape[0]) if len(shape) > 1 else (1, numel)
    return height + width if 2 * (height + width) < numel else numel


def _product(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


@dataclass(frozen=True)
class Contestant:
    """One way to keep the replicas of a model together; `about` says what it is, with versions."""

    name: str
    about: str
    wrap: Callable[[nn.Module], Wrapped]
    optimizer: Callable[[nn.Module], Optimizer]


def contestant(name: str, recipe: Model, transport: Transport, group: Any) -> Contestant:
    """The contestant of that name; `group` is what torch's DDP communicates on."""
    if name == BARE:
        return Contestant(name, "the module alone", Wrapped, recipe.optimizer)
    if name in (TORCH_DDP, FP16, POWER_SGD):
        return _torch_ddp(name, recipe, group)
    algorithm = _algorithm(name)

    def wrap(module: nn.Module) -> Wrapped:
        ddp = DDP(module, transport, algorithm=algorithm)
        return Wrapped(ddp, close=ddp.close)

    about = f"{algorithm}, DDP of murmura {__version__}, {type(transport).__name__}"
    return Contestant(name, about, wrap, _qadam if name == "qadam" else recipe.optimizer)


def _algorithm(name: str) -> Algorithm:
    if name == "async":  # counted in rounds: by the clock it would also communicate while others are measured
        return AsyncModelAverageAlgorithm(sync_interval_rounds=LOCAL_STEPS)
    return algorithm_named(name)


def _qadam(module: nn.Module) -> Optimizer:
    # The second moment of so few steps is tiny here and there; a large eps keeps the weights finite.
    return QAdamOptimizer(module.parameters(), lr=1e-3, warmup_steps=QADAM_WARM_UP, eps=1e-3)


def _torch_ddp(name: str, recipe: Model, group: Any) -> Contestant:
    # PowerSGD's collectives follow each other in callbacks, which nothing orders between two buckets; on Gloo that
    # ended in an abort over messages of unequal sizes. So all gradients go into one bucket.
    bucket_mib = math.ceil(recipe.num_bytes() / 2**20) if name == POWER_SGD else None

    def wrap(module: nn.Module) -> Wrapped:
        ddp = nn.parallel.DistributedDataParallel(
            module, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib
        )
        if name == FP16:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            ddp.register_comm_hook(group, fp16_compress_hook)
        elif name == POWER_SGD:
            from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

            state = PowerSGDState(group, start_powerSGD_iter=POWER_SGD_START)
            ddp.register_comm_hook(state, powerSGD_hook)
        return Wrapped(ddp)

    hook = {FP16: ", fp16_compress_hook", POWER_SGD: ", powerSGD_hook of rank 1 on one bucket"}.get(name, "")
    about = f"DistributedDataParallel of torch {torch.__version__}, gradient_as_bucket_view=True{hook}, Gloo"
    return Contestant(name, about, wrap, recipe.optimizer)
