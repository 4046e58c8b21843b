"""Ray Train on murmura: `prepare_model` in the loop of a TorchTrainer's worker wraps the model in `murmura.DDP`.

Ray starts the workers, makes their process group, stores checkpoints and restarts workers that failed. A checkpoint
holds the mean of the replicas in a plain file, and every worker's own state beside it, from which a restart goes on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

try:
    import ray.train
    import ray.train.torch
except ImportError as error:
    raise ImportError(f"murmura.integrations.ray needs Ray Train: pip install 'murmura[ray]' ({error})") from error

from murmura.algorithms import Algorithm
from murmura.ddp import DDP
from murmura.errors import CheckpointError
from murmura.integrations.replica_state import mean_state_dict, restore_own_state, saving_own_state

__all__ = ["load_checkpoint", "prepare_model", "save_checkpoint"]

MODEL_FILE = "model.pt"
OPTIMIZERS_FILE = "optimizers.pt"


def prepare_model(
    model: nn.Module,
    *,
    algorithm: Algorithm | str | None = None,
    move_to_device: bool | torch.device = True,
    **options: Any,
) -> DDP:
    """Move `model` to the worker's device and keep its replicas together, where ray.train.torch.prepare_model would
    wrap it in torch's DistributedDataParallel. Every worker calls it.

    Args:
        algorithm: an Algorithm or its name; None takes the environment's, else gradient all-reduce.
        move_to_device: as Ray's: False leaves the model where it is.
        options: those of `murmura.DDP`.
    """
    moved = ray.train.torch.prepare_model(model, move_to_device=move_to_device, parallel_strategy=None)
    return DDP(moved, algorithm=algorithm, **options)


def save_checkpoint(folder: str | os.PathLike[str], model: DDP, *optimizers: Optimizer) -> ray.train.Checkpoint:
    """Write a checkpoint into `folder`, a temporary one of this worker, for ``ray.train.report``. Collective.

    Every worker reports what it gets: Ray puts the files of all workers together. `model.pt` is the mean of the
    replicas, as a state dict of the bare model.
    """
    _check_wrapper(model)
    with saving_own_state(folder, model, optimizers):
        mean = mean_state_dict(model)
        if model.transport.rank == 0:
            torch.save(mean, Path(folder) / MODEL_FILE)
            torch.save([each.state_dict() for each in optimizers], Path(folder) / OPTIMIZERS_FILE)
    return ray.train.Checkpoint.from_directory(folder)


def load_checkpoint(checkpoint: ray.train.Checkpoint, model: DDP, *optimizers: Optimizer) -> None:
    """Go on from what `save_checkpoint` wrote: `checkpoint` is that of ``ray.train.get_checkpoint()``. Collective.

    The number of workers may have changed if the algorithm keeps replicas equal; otherwise that is an error.
    """
    _check_checkpoint(checkpoint)
    _check_wrapper(model)
    with checkpoint.as_directory() as folder:
        plain = Path(folder) / MODEL_FILE
        if not plain.exists():
            raise CheckpointError(
                f"rank {model.transport.rank}: {checkpoint} holds no {MODEL_FILE}. Save it with "
                "murmura.integrations.ray.save_checkpoint, and let every worker report it."
            )
        model.load_state_dict(torch.load(plain, weights_only=True, map_location="cpu"))
        states = torch.load(Path(folder) / OPTIMIZERS_FILE, weights_only=True, map_location="cpu")
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        restore_own_state(folder, model, optimizers)


def _check_wrapper(model: object) -> None:
    if not isinstance(model, DDP):
        raise TypeError(f"model is a {type(model).__name__}. Pass the murmura.DDP that prepare_model() returned.")


def _check_checkpoint(checkpoint: object) -> None:
    if not isinstance(checkpoint, ray.train.Checkpoint):
        raise TypeError(
            f"checkpoint={checkpoint!r} is no ray.train.Checkpoint. Pass what ray.train.get_checkpoint() returned, "
            "unless that is None: then nothing was saved yet, and training begins anew."
        )
