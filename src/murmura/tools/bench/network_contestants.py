"""The contestants on a slow link: every algorithm, torch's DDP with and without its hooks, and no communication at all.

Each contestant also knows, by a formula, how many bytes a rank must send for a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from murmura import Algorithm, GradientAllReduceAlgorithm, Transport
from murmura.algorithms import algorithm_named
from murmura.tools.bench.ddp import TORCH_DDP
from murmura.tools.bench.models import Model
from murmura.tools.bench.steps import Method, Wrapped, bare, murmura_ddp
from murmura.tools.experiments.recipes import described_optimizer

FP16, POWER_SGD = f"{TORCH_DDP} fp16", f"{TORCH_DDP} powersgd"
TORCHS = (TORCH_DDP, FP16, POWER_SGD)
BARE = "no communication"
WARM_UP_STEPS = 3
RUN_STEPS = 10  # of the run, as an algorithm's own optimizer is told: a fifth of them warms QAdam up
POWER_SGD_START = 2  # steps without compression, the least that torch takes
BATCH_SECONDS = 0.5  # about what a batch of short steps lasts
MAX_BATCH_STEPS = 10


def algorithm_of(name: str) -> Algorithm | None:
    """None for a contestant that is not murmura's."""
    return None if name in (*TORCHS, BARE) else algorithm_named(name)


def period(name: str) -> int:
    """Return the period of a contestant in steps: they are timed in multiples of it."""
    algorithm = algorithm_of(name)
    return 1 if algorithm is None else algorithm.period


def exchanges_in_background(name: str) -> bool:
    """Whether an exchange continues during the following steps, and the next one begins only some steps later."""
    algorithm = algorithm_of(name)
    return algorithm is not None and algorithm.hides_exchange and algorithm.period > 1


def warm_up_steps(name: str) -> int:
    """Return the number of warm-up steps, after which all steps do the same work."""
    own = int(getattr(algorithm_of(name), "warmup_rounds", 0))
    return max(period(name), POWER_SGD_START + 1, WARM_UP_STEPS, own + 1)


def stays_together(name: str) -> bool:
    """Whether all replicas are equal after a period."""
    algorithm = algorithm_of(name)
    return name != BARE and (algorithm is None or algorithm.keeps_replicas_equal)


def steps_per_batch(name: str, step_seconds: float) -> int:
    """How many steps of about `step_seconds` to time together."""
    few = max(1, min(MAX_BATCH_STEPS, math.ceil(BATCH_SECONDS / step_seconds)))
    return period(name) if period(name) > 1 else few


def formula_bytes(name: str, shapes: Sequence[Sequence[int]], num_ranks: int) -> float:
    """What a rank must send for a step, the mean over ranks and a period: parameters of these `shapes`, float32.

    torch's DDP all-reduces all elements, in fp16 half of the bytes, in PowerSGD of rank 1 h + w elements for a matrix
    of h x w. Plain SGD, which takes the steps here, has no moments to average.
    """
    all_reduce = GradientAllReduceAlgorithm()
    if name == BARE:
        return 0.0
    if name == POWER_SGD:
        return all_reduce.bytes_per_round(sum(_low_rank(shape) for shape in shapes), num_ranks)
    if name == FP16:
        return all_reduce.bytes_per_round(shapes, num_ranks) / 2
    algorithm = algorithm_of(name) or all_reduce
    if getattr(algorithm, "average_moments", False):
        algorithm = replace(algorithm, average_moments=False)  # type: ignore[call-arg]
    return algorithm.bytes_per_round(shapes, num_ranks)


def _low_rank(shape: Sequence[int]) -> int:
    """What PowerSGD of rank 1 sends for a tensor: torch compresses a matrix if that saves more than a half."""
    numel = _product(shape)
    height, width = (shape[0], numel // shape[0]) if len(shape) > 1 else (1, numel)
    return height + width if 2 * (height + width) < numel else numel


def _product(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def method_of(name: str, recipe: Model, transport: Transport, group: Any) -> Method:
    """The contestant of that name; `group` is what torch's DDP communicates on."""
    if name == BARE:
        return bare(name)
    if name in TORCHS:
        return _torch_ddp(name, recipe, group)
    algorithm = algorithm_named(name)
    method = murmura_ddp(name, transport, algorithm=algorithm)
    if _own_optimizer(algorithm, nn.Linear(1, 1)) is None:
        return method

    def optimizer(module: nn.Module) -> Optimizer:
        own = _own_optimizer(algorithm, module)
        assert own is not None
        return own

    about = f"{method.about}, {described_optimizer(optimizer(nn.Linear(1, 1)))}"
    return replace(method, optimizer=optimizer, about=about)


def _own_optimizer(algorithm: Algorithm, module: nn.Module) -> Optimizer | None:
    own = algorithm.own_optimizer(module.parameters(), 1e-3, RUN_STEPS)
    for group in own.param_groups if own is not None else ():
        if "eps" in group:
            group["eps"] = 1e-3  # Adam's second moment of so few steps is tiny here and there; weights stay finite
    return own


def _torch_ddp(name: str, recipe: Model, group: Any) -> Method:
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
    return Method(name, about, wrap)
