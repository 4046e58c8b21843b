"""The plain murmura loop that frameworks are compared with: a small model, batches by rank, accumulation, clipping."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from murmura import DDP, Algorithm, DiLoCoAlgorithm, GradientAllReduceAlgorithm, LowPrecisionDecentralizedAlgorithm

ALGORITHMS = {
    "gradient_allreduce": GradientAllReduceAlgorithm(),
    "low_precision_decentralized": LowPrecisionDecentralizedAlgorithm(),
    "diloco": DiLoCoAlgorithm(3),
}
BATCH = 2
CLIP = 0.3


@dataclass(frozen=True)
class Task:
    """What is trained: `steps` of the optimizer, each of `accumulate` batches, in `precision`."""

    steps: int = 8
    accumulate: int = 1
    precision: str = "no"  # as Accelerate calls it; "bf16" and "fp16" are autocast over float32 weights
    device: str = "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "no" else torch.float32


def model(task: Task) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1)).to(task.dtype)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def dataset(task: Task, world_size: int) -> TensorDataset:
    """Rank r takes batch r of every `world_size`, which is how Accelerate hands them out."""
    num = task.steps * task.accumulate * BATCH * world_size
    random = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(num, width, generator=random, dtype=task.dtype) for width in (5, 1)))


def batches(task: Task) -> list[Any]:
    data, rank, size = dataset(task, dist.get_world_size()), dist.get_rank(), dist.get_world_size()
    num = task.steps * task.accumulate
    return [data[(index * size + rank) * BATCH : (index * size + rank + 1) * BATCH] for index in range(num)]


def weights(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().cpu().clone() for parameter in module.parameters()]


def plain(algorithm: Algorithm | str, task: Task) -> list[Tensor]:
    """This rank's weights after the plain loop."""
    with contextlib.closing(DDP(model(task).to(task.device), algorithm=algorithm)) as ddp:
        steps = optimizer(ddp.parameters())
        scaler = torch.amp.GradScaler(task.device, enabled=task.precision == "fp16")
        for index, (inputs, targets) in enumerate(batches(task), 1):
            is_last = index % task.accumulate == 0
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                with autocast(task.device, task.precision):
                    outputs = ddp(inputs.to(task.device))
                loss = nn.functional.mse_loss(outputs.to(task.dtype), targets.to(task.device))
                scaler.scale(loss / task.accumulate).backward()
            if is_last:
                scaler.unscale_(steps)
                nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)
                scaler.step(steps)
                scaler.update()
                steps.zero_grad()
        return weights(ddp.module)


def autocast(device: str, precision: str) -> torch.autocast:
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device, dtype, enabled=precision != "no")


def far(first: list[Tensor], second: list[Tensor]) -> float:
    """The largest difference between two lists of weights."""
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def mean(ranks: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*ranks, strict=True)]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
