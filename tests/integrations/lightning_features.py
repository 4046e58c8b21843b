"""Single features of Lightning on murmura, for its tests."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from integrations import lightning_task as loops
from integrations.lightning_programs import Own, Task, fit, trainer
from integrations.lightning_task import Options
from murmura import DDP
from murmura.integrations.lightning import MurmuraStrategy
from murmura.integrations.lightning.common import write_means


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
    write_means(state, torch.device("cpu"))
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


def told(work: Any) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Wrapped(Task):
    """Wraps its network itself, as a script did before it came to the Trainer."""

    def setup(self, stage: str) -> None:
        self.net = DDP(self.net)


def refusals() -> dict[str, str]:
    """What users are told who do what cannot work."""
    import pytorch_lightning

    loader = DataLoader(loops.dataset(Options()), loops.BATCH)

    def with_hook(algorithm: str) -> None:
        strategy = MurmuraStrategy(algorithm, ddp_comm_hook=allreduce_hook, ddp_comm_state=dist.group.WORLD)
        trainer(strategy).fit(Task(), loader)

    return {
        "unknown": told(lambda: MurmuraStrategy("sharding")),
        "no algorithm": told(lambda: MurmuraStrategy(3)),  # type: ignore[arg-type]
        "transport": told(lambda: MurmuraStrategy(transport=None)),
        "period": told(lambda: MurmuraStrategy(model_averaging_period=4)),
        "unknown option": told(lambda: MurmuraStrategy(shards=3)),
        "size": told(lambda: MurmuraStrategy(bucket_size_bytes=-1)),
        "start": told(lambda: MurmuraStrategy("diloco", init_sync=False)),
        "timeout": told(lambda: MurmuraStrategy(timeout=-1)),
        "good": told(lambda: MurmuraStrategy(timeout=timedelta(1), find_unused_parameters=True, ignore=["a"])),
        "wrapped": told(lambda: trainer("murmura").fit(Wrapped(), loader)),
        "name": told(lambda: trainer("murmura_sharding")),
        "other package": told(lambda: pytorch_lightning.Trainer(strategy=MurmuraStrategy(), accelerator="cpu")),
        "hook": told(lambda: with_hook("gradient_allreduce")),
        "hook and diloco": told(lambda: with_hook("diloco")),
    }


def uneven() -> str:
    """One rank has fewer batches than the other."""
    options = Options(steps=3 + dist.get_rank())
    loader = DataLoader(loops.dataset(options), loops.BATCH)
    os.environ["MURMURA_TIMEOUT"] = "3"
    return told(lambda: trainer("murmura").fit(Task(), loader))


def alone() -> float:
    """A world of one: the distance to the plain loop."""
    options = Options(accumulate=2, clip=0.1)
    own, _ = fit(MurmuraStrategy(loops.algorithm("diloco")), options)
    return loops.distance(loops.train("diloco", options), own)


def logged() -> dict[str, Any]:
    """What `sync_dist` logging and `all_gather` give."""

    class Logs(Task):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            rank = dist.get_rank()
            self.log("mean", float(rank), sync_dist=True, on_step=True, on_epoch=True)
            self.log("sum", float(rank + 1), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
            self.gathered = self.all_gather(torch.tensor([rank]))
            self.integer = self.trainer.strategy.reduce(torch.tensor(rank + 1), reduce_op="mean")
            self.told = self.trainer.strategy.broadcast(f"from {rank}")
            return super().training_step(batch, batch_idx)

    task = Logs()
    run = trainer("murmura_low_precision_decentralized", log_every_n_steps=1)
    run.fit(task, DataLoader(loops.dataset(Options(steps=3)), loops.BATCH))
    metrics = {name: value.item() for name, value in run.callback_metrics.items()}
    return {**metrics, "gathered": task.gathered.tolist(), "integer": task.integer.item(), "told": task.told}


class Skips(Task):
    """One rank leaves out steps, as a GradScaler does that found an infinity, and all wait for each other after it."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if dist.get_rank() == 0 and batch_idx in (2, 5):
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)

    def on_train_batch_end(self, *args: Any) -> None:
        dist.barrier()  # which murmura does not see
        self.log("ends", 1.0, sync_dist=True)


def skipped_steps(name: str) -> float:
    task = Skips()
    os.environ["MURMURA_TIMEOUT"] = "10"
    trainer(MurmuraStrategy(loops.algorithm(name))).fit(task, DataLoader(loops.dataset(Options(steps=12)), loops.BATCH))
    return float(task.net[0].weight.sum())


def saved_while_accumulating(folder: str) -> tuple[Any, Any, list[str]]:
    """Own weights of a fit that saves in the middle of an accumulation, those of one resumed from it, and warnings."""

    class Saves(Own):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if args[-1] == 5:
                trainer.save_checkpoint(f"{folder}/early.ckpt")

    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("murmura").addHandler(handler)
    options = Options(accumulate=4, steps=4)
    strategy = [MurmuraStrategy(loops.algorithm("low_precision_decentralized")) for _ in range(2)]
    loader, saves, own = DataLoader(loops.dataset(options), loops.BATCH), Saves(), Own()
    trainer(strategy[0], options, callbacks=[saves]).fit(Task(), loader)
    trainer(strategy[1], options, callbacks=[own]).fit(Task(), loader, ckpt_path=f"{folder}/early.ckpt")
    return saves.own, own.own, told
