"""Hooks of a strategy into moments of a fit that Lightning reports only to callbacks.

Lightning calls callbacks in the order of `trainer.callbacks`: `First` runs before those of the user, `Last` after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback, WeightAveraging

from murmura.errors import UsageError
from murmura.integrations.lightning.common import gather

if TYPE_CHECKING:
    from murmura.integrations.lightning.strategy import MurmuraStrategy


class First(Callback):
    """Restores each rank's own weights after validation, before a callback saves or swaps them."""

    def __init__(self, strategy: MurmuraStrategy) -> None:
        self._strategy = strategy

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._strategy.announce()

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._strategy.end_mean(level=2)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._strategy.end_mean(level=1)
        if not trainer.sanity_checking:
            require_equal_metrics(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        require_equal_metrics(trainer)


class Last(Callback):
    """Averages over the ranks again after a WeightAveraging callback has put its own averages into the model."""

    def __init__(self, strategy: MurmuraStrategy) -> None:
        self._strategy = strategy

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if any(isinstance(each, WeightAveraging) for each in trainer.callbacks):
            self._strategy.begin_mean(level=2)


def monitored(trainer: Any) -> list[str]:
    """The names of the metrics on which callbacks and schedulers decide: to stop, what to keep, the learning rate."""
    of_callbacks = [getattr(each, "monitor", None) for each in trainer.callbacks]
    of_schedulers = [each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
    return sorted({name for name in (*of_callbacks, *of_schedulers) if isinstance(name, str)})


def require_equal_metrics(trainer: Any) -> None:
    """Raise `UsageError` on all ranks if they differ in a metric that is `monitored`. Collective."""
    names = monitored(trainer)
    if names:
        _require_equal(names, trainer.callback_metrics)


def check_plateaus(trainer: Any) -> None:
    """Require equal metrics whenever Lightning steps a ReduceLROnPlateau scheduler; `release_plateaus` undoes this.

    Such a scheduler may step after any batch, when no callback is called.
    """
    module = trainer.lightning_module
    step = module.lr_scheduler_step

    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.scheduler is scheduler and config.reduce_on_plateau:
                trainer.strategy.announce()
                _require_equal([config.monitor], {config.monitor: metric})
        step(scheduler, metric)

    module.lr_scheduler_step = lr_scheduler_step


def release_plateaus(module: Any) -> None:
    """Undo `check_plateaus`."""
    module.__dict__.pop("lr_scheduler_step", None)


def _require_equal(names: list[str], metrics: Mapping[str, Any]) -> None:
    ranks = gather({name: repr(float(metrics[name])) for name in names if name in metrics})
    for name in names:
        values = [each.get(name) for each in ranks]
        if len(set(values)) > 1:
            shown = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise UsageError(
                f"{name!r} decides when to stop, what to keep or the learning rate, and the ranks have different "
                f"values of it ({shown}), so they would decide differently. Log it with sync_dist=True, or log a "
                "torchmetrics Metric."
            )
