"""Fits that validate, stop, save, are killed and resume, for the tests of Lightning."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn
from torch.utils.data import DataLoader

from integrations import lightning_task as loops
from integrations.lightning_programs import Own, Task, trainer
from integrations.lightning_task import Options, Weights
from murmura import CheckpointError
from murmura.integrations.lightning import MurmuraStrategy

EPOCH = Options(steps=5)  # of each epoch
EPOCHS = 4


class Life(Task):
    """With Adam, buffers that move, a scheduler, and validation."""

    def __init__(self, sync_dist: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(6), *loops.net())
        self.sync_dist = sync_dist
        self.validated: list[Weights] = []
        self.tested: list[Weights] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(loops.weights(self.net))
        self.log("val", loops.loss_of(self, *batch), sync_dist=self.sync_dist)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.tested.append(loops.weights(self.net))
        self.log("test", loops.loss_of(self, *batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=0.01)
        return [adam], [torch.optim.lr_scheduler.ExponentialLR(adam, 0.8)]


class Plateau(Life):
    """With a scheduler that follows a metric; Lightning saves before it steps, so a resumed run would differ."""

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0, threshold=0.5)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


class StepPlateau(Life):
    """With a scheduler that follows a metric of the training step, after every second one."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = loops.loss_of(self, *batch)
        self.log("now", loss, sync_dist=self.sync_dist)
        return loss

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, patience=0, threshold=0.5)
        follows = {"scheduler": plateau, "monitor": "now", "interval": "step", "frequency": 2}
        return {"optimizer": adam, "lr_scheduler": follows}


class Simple(Life):
    """Without a scheduler, for callbacks that bring their own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Record(pl.Callback):
    """Keeps the weights of this rank when validation begins and after it."""

    def __init__(self) -> None:
        self.before: list[Weights] = []
        self.after: list[Weights] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.before.append(loops.weights(pl_module.net))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.after.append(loops.weights(pl_module.net))


class Kill(pl.Callback):
    """Ends this process without a word in the third epoch."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (2, 3):
            os.kill(os.getpid(), signal.SIGKILL)


def loaders(epoch: Options = EPOCH) -> tuple[DataLoader[Any], DataLoader[Any]]:
    rank = dist.get_rank()
    validation = loops.dataset(Options(steps=2), rank=rank + 10)
    return DataLoader(loops.dataset(epoch), loops.BATCH), DataLoader(validation, loops.BATCH)


def strategy(name: str) -> Any:
    return MurmuraStrategy(loops.algorithm(name))


def saves(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, monitor="val", save_last=True, save_top_k=1, filename="{epoch}-{val:.4f}")


def live(name: str, folder: str, epochs: int = EPOCHS, kill: bool = False, resume: bool = False) -> dict[str, Any]:
    """A fit with checkpoints in `folder`: from the beginning or the last of them, to the end or to a kill.

    It accumulates and clips, and the kill comes between two batches of one step.
    """
    epoch = Options(steps=5, accumulate=4, clip=0.1)
    life, own = Life(), Own()
    callbacks = [saves(folder), EarlyStopping("val", patience=50), own, *([Kill()] if kill else [])]
    settings = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": epochs}
    run = trainer(strategy(name), epoch, **settings)
    run.fit(life, *loaders(epoch), ckpt_path=f"{folder}/last.ckpt" if resume else None, weights_only=True)
    return {
        "own": own.own,
        "after": loops.weights(life.net),
        "lr": run.optimizers[0].param_groups[0]["lr"],
        "steps": run.global_step,
    }


def plain_file(folder: str) -> Weights:
    """The weights in the last checkpoint, as any program would load them."""
    life = Life()
    checkpoint = torch.load(f"{folder}/last.ckpt", weights_only=True)
    life.load_state_dict(checkpoint["state_dict"])
    return loops.weights(life.net)


def saved_after_the_fit(name: str, folder: str) -> tuple[Weights, Weights, Weights, Weights]:
    """Own weights of a whole run, and of one that was saved after its fit and resumed; plain weights; the module's."""
    whole, own, life = Own(), Own(), Life()
    trainer(strategy(name), callbacks=[whole], max_epochs=EPOCHS).fit(Life(), *loaders())
    first = trainer(strategy(name), max_epochs=2)
    first.fit(life, *loaders())
    first.save_checkpoint(f"{folder}/last.ckpt")
    plain = plain_file(folder)
    second = trainer(strategy(name), callbacks=[own], max_epochs=EPOCHS)
    second.fit(Life(), *loaders(), ckpt_path=f"{folder}/last.ckpt")
    return whole.own, own.own, plain, loops.weights(life.net)


def changed_algorithm(folder: str) -> tuple[str, Weights, Weights]:
    """What is told of a checkpoint of another algorithm, the weights in it, and those a fit without replicas/ takes."""
    path, life = f"{folder}/last.ckpt", Life()
    first = trainer(strategy("diloco"), max_epochs=1)
    first.fit(Life(), *loaders())
    first.save_checkpoint(path)
    plain = plain_file(folder)
    try:
        trainer("murmura", max_epochs=2).fit(Life(), *loaders(), ckpt_path=path)
        told = "nothing"
    except CheckpointError as error:
        told = str(error)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/replicas")
    dist.barrier()
    trainer("murmura", max_epochs=1).fit(life, *loaders(), ckpt_path=path)
    return told, plain, loops.weights(life.net)


def validate(name: str, folder: str) -> dict[str, Any]:
    """What validation and test saw."""
    life, record, own = Life(), Record(), Own()
    run = trainer(strategy(name), callbacks=[record, own, saves(folder)], enable_checkpointing=True, max_epochs=EPOCHS)
    run.fit(life, *loaders())
    best = run.checkpoint_callback.best_model_path
    run.test(life, loaders()[1])
    after = life.tested.pop(), run.callback_metrics["test"].item()
    run.test(life, loaders()[1], ckpt_path="best")
    return {
        "validated": life.validated,
        "before": record.before,
        "after": record.after,
        "own": own.own,
        "best": best,
        "metrics": [run.callback_metrics["test"].item(), after[1]],
        "tested": after[0],
        "files": sorted(path.name for path in Path(folder).iterdir()),
        "replicas": sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.pt")),
    }


def averaged(name: str, which: str, folder: str) -> dict[str, Any]:
    """A fit with averaged weights, whole, and the same one saved after its second epoch and resumed."""

    def callbacks() -> list[Any]:
        if which == "ema":
            return [EMAWeightAveraging(decay=0.7), Own()]
        return [StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1), Own()]

    whole, life = callbacks(), Simple()
    run = trainer(strategy(name), callbacks=[*whole, ModelCheckpoint(folder, save_top_k=-1)], enable_checkpointing=True)
    run.fit_loop.max_epochs = EPOCHS
    run.fit(life, *loaders())
    path = next(Path(folder).glob("epoch=1-*.ckpt"))
    again, resumed = callbacks(), Simple()
    second = trainer(strategy(name), callbacks=again, max_epochs=EPOCHS)
    second.fit(resumed, *loaders(), ckpt_path=str(path))
    return {
        "whole": whole[1].own,
        "resumed": again[1].own,
        "after": loops.weights(life.net),
        "validated": life.validated,
        "averages": averages(next(Path(folder).glob("epoch=2-*.ckpt"))) if which == "swa" else None,
    }


def averages(path: Path) -> tuple[Weights, Weights]:
    """The averages of StochasticWeightAveraging in the plain file and, if there are any, in this rank's own."""
    own = next((path.parent / "replicas" / path.name).glob(f"*-rank-{dist.get_rank()}.pt"))
    checkpoints = torch.load(path), torch.load(own)["checkpoint"]
    plain, mine = (
        {
            name: value
            for state in each.get("callbacks", {}).values()
            for name, value in (state.get("average_model_state") or {}).items()
            if "num_batches" not in name
        }
        for each in checkpoints
    )
    return plain, mine


def unequal(which: str) -> tuple[str, int]:
    """A metric that is not equal on all ranks decides something: what a fit says, and after how many steps."""
    kinds = {"plateau": Plateau, "plateau of a step": StepPlateau, "stopping": Simple}
    life: Life = kinds[which](sync_dist=False)
    callbacks: list[Any] = [EarlyStopping("val")] if which == "stopping" else []
    run = trainer(strategy("gradient_allreduce"), callbacks=callbacks)
    try:
        run.fit(life, *loaders())
    except Exception as error:
        return f"{type(error).__name__}: {error}", run.global_step
    return "nothing", run.global_step


def decisions() -> dict[str, Any]:
    """Where fits stop, and to what learning rates they come, that follow a metric which is equal on all ranks."""
    stopping = EarlyStopping("val", patience=2, min_delta=100.0)
    stopped = trainer(strategy("diloco"), callbacks=[stopping], max_epochs=50)
    stopped.fit(Simple(), *loaders())
    found: dict[str, Any] = {"epochs": stopped.current_epoch}
    for kind in (Plateau, StepPlateau):
        run = trainer(strategy("diloco"), max_epochs=EPOCHS)
        run.fit(kind(), *loaders())
        found[kind.__name__] = run.optimizers[0].param_groups[0]["lr"]
        assert "lr_scheduler_step" not in vars(run.lightning_module)
    return found
