"""A training run as a user writes it, which can be cut short and taken up again.

What runs on ranks stands at the top level, so that processes can import it.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from ddp.models import fill, values, weights_of
from murmura import (
    DDP,
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    Checkpointer,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    MinMaxUInt8,
    Phased,
    PowerSGDAlgorithm,
    PushSumAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    StreamingDiLoCoAlgorithm,
    TopK,
    Transport,
    data,
    seed_everything,
)
from sequences.algorithms import lopsided

NUM_STEPS = 10
SAVE_EVERY = 2


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def qadam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return QAdamOptimizer(parameters, lr=0.01, warmup_steps=5)


@dataclass(frozen=True)
class Way:
    """A way of training: an algorithm and an optimizer for it."""

    algorithm: Algorithm
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = momentum
    differ: bool = False


WAYS = {
    "gradient_allreduce": Way(GradientAllReduceAlgorithm(), adam),
    "error_feedback": Way(ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8()))),
    "decentralized": Way(DecentralizedAlgorithm(communication_interval=2), differ=True),
    "shift_one": Way(DecentralizedAlgorithm(peer_selection_mode="shift_one"), adam, differ=True),
    "low_precision": Way(LowPrecisionDecentralizedAlgorithm(), differ=True),
    "local_sgd": Way(LocalSGDAlgorithm(3), differ=True),
    "diloco": Way(DiLoCoAlgorithm(3, compressor=ErrorFeedback(MinMaxUInt8())), adam, differ=True),
    "qadam": Way(QAdamAlgorithm(), qadam),
    "async_by_rounds": Way(AsyncModelAverageAlgorithm(sync_interval_rounds=2), differ=True),
    "powersgd": Way(PowerSGDAlgorithm(2, min_compression_rate=1.0)),
    "topk": Way(GradientAllReduceAlgorithm(compressor=ErrorFeedback(TopK(0.1)))),
    "push_sum": Way(PushSumAlgorithm(lopsided), adam, differ=True),
    "streaming_diloco": Way(StreamingDiLoCoAlgorithm(3, fragments=2, overlap=1), adam, differ=True),
    "phased": Way(Phased(LocalSGDAlgorithm(2), 5, then=GradientAllReduceAlgorithm()), differ=True),
}


class Model(nn.Module):
    """Has buffers that training changes and, if asked, random numbers of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def dataset() -> TensorDataset:
    return TensorDataset(values(44, 5, seed=1), values(44, 3, seed=2))


def train(
    transport: Transport,
    way: str,
    folder: Path | None,
    *,
    dropout: float = 0.0,
    stop_at: int = NUM_STEPS,
    kill: tuple[int, int] | None = None,
) -> tuple[Tensor, list[int], int]:
    """Train to step `stop_at`, from the last checkpoint in `folder`; save every second step there.

    Returns the weights and buffers of this rank, the steps it took, and the number of rounds. `kill` is a step and a
    rank that dies in it.
    """
    if dropout:
        seed_everything(3, transport.rank)
    torch_model = fill(Model(dropout))
    ddp = DDP(torch_model, transport, algorithm=WAYS[way].algorithm)
    optimizer = WAYS[way].optimizer(ddp.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    batches = data.loader(dataset(), transport, 4, seed=5)
    parts: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "sampler": batches}
    checkpointer = None if folder is None else Checkpointer(folder, keep=2)
    restored = None if checkpointer is None else checkpointer.load(ddp=ddp, **parts)
    step, steps = 0 if restored is None else restored.step, []
    while step < stop_at:
        for x, y in batches:
            noise = float(np.random.rand() + random.random()) if dropout else 0.0
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x + noise), y + transport.rank).backward()
            if (step, transport.rank) == kill:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            scheduler.step()
            steps.append(step)
            step += 1
            if checkpointer is not None and step % SAVE_EVERY == 0:
                checkpointer.save(step, ddp=ddp, **parts)
            if step == stop_at:
                break
    rounds = ddp.algorithm_state_dict()["round"]
    ddp.close()
    buffers = [buffer.double().reshape(-1) for buffer in torch_model.buffers()]
    return torch.cat([weights_of(torch_model).double(), *buffers]), steps, rounds


def checkpoints_in(folder: Path) -> list[str]:
    """All names in the folder but that of its lock, which is there as long as somebody may still save."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")
