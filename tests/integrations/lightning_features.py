"""Single features of Lightning on murmura, for its tests."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from integrations import lightning_task as loops
from integrations.lightning_programs import Own, Task, trainer
from integrations.lightning_task import Options
from murmura import DDP
from murmura.integrations.lightning import MurmuraStrategy, own_files


class Raises(Task):
    """One rank ends in the middle of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if dist.get_rank() == 1 and batch_idx == 3:
            raise ValueError("no more")
        return super().training_step(batch, batch_idx)


def one_rank_raises() -> None:
    trainer(MurmuraStrategy()).fit(Raises(), DataLoader(loops.dataset(Options()), loops.BATCH))


def means() -> dict[str, Any]:
    rank = dist.get_rank()
    mine = torch.tensor([1.0, 2.0]) * (rank + 1)
    state = {"mean": mine, "half": mine.bfloat16(), "count": torch.tensor(rank), "none": None}
    own_files.write_means(state, torch.device("cpu"))
    assert torch.equal(mine, torch.tensor([1.0, 2.0]) * (rank + 1))
    return {**state, "rank": rank}


class Adversaries(pl.LightningModule):
    """Two networks and two optimizers, each toggled in turn, as a GAN has them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(2)
        self.maker = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.judge = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def losses(self, inputs: torch.Tensor) -> Any:
        yield self.maker, lambda: -self.judge(self.maker(inputs)).mean()
        yield self.judge, lambda: self.judge(self.maker(inputs).detach()).mean() - self.judge(inputs).tanh().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, (_, loss) in zip(self.optimizers(), self.losses(batch[0]), strict=True):
            self.toggle_optimizer(optimizer)
            value = loss()
            optimizer.zero_grad()
            self.manual_backward(value)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log("loss", value, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.maker, self.judge)]


def manual(name: str) -> tuple[Any, Any]:
    """Weights of the plain loop with two optimizers, and of a fit."""
    options = Options()
    plain = Adversaries()
    ddp = DDP(plain, algorithm=loops.algorithm(name))
    steps = plain.configure_optimizers()
    for inputs in loops.dataset(options).tensors[0].split(loops.BATCH):
        for optimizer, (part, loss) in zip(steps, plain.losses(inputs), strict=True):
            for parameter in plain.parameters():
                parameter.requires_grad_(False)
            part.requires_grad_(True)
            value = loss()
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(part.parameters(), 0.5)
            optimizer.step()
            plain.requires_grad_(True)
    expected = loops.weights(plain)
    ddp.close()

    class Whole(Own):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.own = loops.weights(pl_module)

    fitted, own = Adversaries(), Whole()
    trainer(MurmuraStrategy(loops.algorithm(name)), callbacks=[own]).fit(
        fitted, DataLoader(loops.dataset(options), loops.BATCH)
    )
    return expected, own.own
