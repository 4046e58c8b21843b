"""What the tests of Lightning run on ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from integrations import lightning_task as loops
from integrations.lightning_task import Options, Weights
from murmura.integrations.lightning import MurmuraStrategy


class Task(pl.LightningModule):
    """The task of the plain loop."""

    def __init__(self) -> None:
        super().__init__()
        self.net = loops.net()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return loops.loss_of(self, *batch)

    def configure_optimizers(self) -> Any:
        return loops.optimizer(self)


class Own(pl.Callback):
    """Keeps the weights of this rank before the strategy leaves the mean of all."""

    own: Weights

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.own = loops.weights(pl_module.net)


def trainer(strategy: Any, options: Options = Options(), **others: Any) -> pl.Trainer:  # noqa: B008
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": dist.get_world_size() if dist.is_initialized() else 1,
        "precision": options.precision,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "max_epochs": 1,
    }
    return pl.Trainer(
        strategy=strategy,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip,
        **{**settings, **others},
    )


def start(place: dict[str, Any]) -> None:
    """Make the process group as a fit would, before the first one."""
    first = trainer("murmura", **place)
    first.strategy.connect(Task())
    first.strategy.setup_environment()


def fit(strategy: Any, options: Options, **others: Any) -> tuple[Weights, Weights]:
    """This rank's own weights at the end of a fit, and what the module holds afterwards."""
    task, own = Task(), Own()
    run = trainer(strategy, options, callbacks=[own], **others)
    run.fit(task, DataLoader(loops.dataset(options), batch_size=loops.BATCH))
    return own.own, loops.weights(task.net)


def against_the_plain_loop(name: str) -> dict[str, Any]:
    """By options: the weights of the plain loop, those of a fit, those after it, and of Lightning's own strategy."""
    return {
        case: (
            loops.train(name, options),
            *fit(MurmuraStrategy(loops.algorithm(name)), options),
            fit("ddp", options)[0] if name == "gradient_allreduce" else None,
        )
        for case, options in loops.OPTIONS.items()
    }
