"""The plain murmura loop, and its task: what a framework's run must equal. Imports no framework."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from murmura import DDP, Algorithm, DiLoCoAlgorithm, GradientAllReduceAlgorithm, LocalSGDAlgorithm, Phased
from murmura.algorithms import algorithm_named

STEPS = 20
BATCH = 4
Weights = dict[str, Tensor]


def algorithm(name: str) -> Algorithm:
    """By name; diloco synchronises several times in `STEPS`, and "phased" changes to another algorithm after 11."""
    if name == "phased":
        return Phased(LocalSGDAlgorithm(2), 11, then=GradientAllReduceAlgorithm())
    return DiLoCoAlgorithm(6) if name == "diloco" else algorithm_named(name)


@dataclass(frozen=True)
class Options:
    """Of a loop: what frameworks have arguments for."""

    accumulate: int = 1
    clip: float | None = None
    precision: str = "32-true"  # as Lightning calls it
    steps: int = STEPS


OPTIONS = {
    "plain": Options(),
    "accumulation": Options(accumulate=4),
    "clipping": Options(clip=0.1),
    "bf16": Options(precision="bf16-mixed"),
    "everything": Options(accumulate=4, clip=0.1, precision="bf16-mixed"),
}


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def data(rank: int, num_batches: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a rank: so many batches of `BATCH`."""
    generator = torch.Generator().manual_seed(100 + rank)
    inputs = torch.randn(num_batches * BATCH, 6, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin() + 0.1 * rank


def dataset(options: Options, rank: int | None = None) -> torch.utils.data.TensorDataset:
    """That of this rank, for all steps."""
    return torch.utils.data.TensorDataset(
        *data(dist.get_rank() if rank is None else rank, options.steps * options.accumulate)
    )


def loss_of(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(model(inputs).float(), targets)


def weights(module: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def train(name: str, options: Options, device: str = "cpu") -> Weights:
    """The weights of this rank after the plain loop."""
    module = net().to(device)
    ddp = DDP(module, algorithm=algorithm(name))
    steps = optimizer(module)
    inputs, targets = (each.to(device) for each in dataset(options).tensors)
    dtype = torch.float16 if options.precision == "16-mixed" else torch.bfloat16
    if device == "cpu":
        dtype = torch.bfloat16  # as Lightning has it there
    scaler = torch.amp.GradScaler(device, enabled=dtype is torch.float16)
    batches = list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))
    for index, batch in enumerate(batches, 1):
        syncs = index % options.accumulate == 0
        with contextlib.nullcontext() if syncs else ddp.no_sync():
            with torch.autocast(device, dtype, enabled=options.precision != "32-true"):
                loss = loss_of(ddp, *batch)
            scaler.scale(loss / options.accumulate).backward()
        if syncs:
            scaler.unscale_(steps)
            if options.clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), options.clip)
            scaler.step(steps)
            scaler.update()
            steps.zero_grad()
    ddp.close()
    return weights(module)


def distance(mine: Weights, others: Weights) -> float:
    """The largest absolute difference."""
    assert mine.keys() == others.keys()
    return max(float((mine[name].double() - others[name].double()).abs().max()) for name in mine)


def mean(replicas: list[Weights]) -> Weights:
    return {name: torch.stack([each[name].double() for each in replicas]).mean(0) for name in replicas[0]}
