"""The training loop of one rank, for all experiments and commands that train."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from murmura.algorithms import algorithm_named
from murmura.ddp import DDP
from murmura.tools.experiments.recipes import optimizer_for
from murmura.tools.experiments.tasks import Batch, Task
from murmura.transports.base import Transport

RAMP_STEPS = 10


class TrainingLoop:
    """Trains `task` on this rank for `steps` steps, one at a time; every rank calls the same methods.

    `model` is the wrapped module, murmura's DDP or torch's; `optimizer` updates its parameters. Batches are drawn on
    the CPU, so that they are the same everywhere, and brought to the device of the parameters.

    Attributes:
        step: how many steps are done. Set it, with the state of the others, to resume.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: Optimizer, rank: int, steps: int) -> None:
        self.task = task
        self.step = 0
        self.steps = steps
        self.model = model
        self.optimizer = optimizer
        self.scheduler = LambdaLR(optimizer, lambda step: _share_of_learning_rate(step, steps))
        self._rank = rank
        self._device = next(model.parameters()).device
        self._held_out = [self._placed(batch) for batch in task.held_out()]

    def advance(self) -> float:
        """Take one step and return the loss on this rank's batch."""
        inputs, targets = self._placed(self.task.batch(self._rank, self.step))
        self.optimizer.zero_grad()
        loss = self.task.loss(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the held-out loss of the mean of all replicas. Collective."""
        self.model.eval()
        try:
            with self._mean_of_replicas():
                losses = [self.task.loss(self.model(inputs), targets) for inputs, targets in self._held_out]
        finally:
            self.model.train()
        return float(torch.stack(losses).mean())

    def _placed(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self._device), targets.to(self._device)

    def _mean_of_replicas(self) -> AbstractContextManager[None]:
        """Hold the mean of the replicas in the model; a no-op if replicas are equal."""
        return contextlib.nullcontext()


class Training(TrainingLoop):
    """The loop under murmura's DDP, with the algorithm of that name and its optimizer.

    Attributes:
        ddp, optimizer, scheduler: the usual objects of a training script, for a checkpoint.
    """

    def __init__(self, transport: Transport, task: Task, algorithm: str, steps: int, device: str = "cpu") -> None:
        self.ddp = DDP(task.model().to(device), transport, algorithm=algorithm_named(algorithm))
        optimizer = optimizer_for(algorithm, self.ddp, task.learning_rate, steps)
        super().__init__(task, self.ddp, optimizer, transport.rank, steps)

    def _mean_of_replicas(self) -> AbstractContextManager[None]:
        return self.ddp.average_parameters()

    def close(self) -> None:
        self.ddp.close()


def _share_of_learning_rate(step: int, steps: int) -> float:
    """A short linear warm-up, then a cosine decay to a tenth."""
    ramp = min(1.0, (step + 1) / RAMP_STEPS)
    return ramp * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / max(1, steps))))
