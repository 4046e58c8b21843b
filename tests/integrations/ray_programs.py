"""Trainings on a local Ray cluster, run as a program of its own: ``python -m integrations.ray_programs CHOICES``.

CHOICES is a list in JSON, with an object for each; what its workers found is written to files in its folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from integrations.loops import ALGORITHMS, CLIP, Task, batches, model, optimizer, plain, weights


def worker(choices: dict[str, Any]) -> None:
    """Train as Ray's own examples do, a checkpoint after every step; compare with the plain loop."""
    import ray.train
    import ray.train.torch

    from murmura.integrations.ray import load_checkpoint, prepare_model, save_checkpoint

    torch.set_num_threads(1)
    folder, task = Path(choices["folder"]), Task(accumulate=choices["accumulate"], precision=choices["precision"])
    algorithm = ALGORITHMS[choices["algorithm"]]
    rank = ray.train.get_context().get_world_rank()
    wrapped: Any = (
        ray.train.torch.prepare_model(model(task))
        if choices["own"]
        else prepare_model(model(task), algorithm=algorithm)
    )
    steps = optimizer(wrapped.parameters())
    checkpoint, begin = ray.train.get_checkpoint(), 0
    if checkpoint is not None:
        load_checkpoint(checkpoint, wrapped, steps)
        with checkpoint.as_directory() as found:
            begin = json.loads((Path(found) / "step.json").read_text())
            (folder / f"files-{rank}.json").write_text(json.dumps(sorted(os.listdir(found))))
    mine = batches(task)
    for step in range(begin, task.steps):
        for index in range(task.accumulate):
            inputs, targets = mine[step * task.accumulate + index]
            wrapped.require_backward_grad_sync = index == task.accumulate - 1
            with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bf16"):
                outputs = wrapped(inputs)
            (nn.functional.mse_loss(outputs.to(task.dtype), targets) / task.accumulate).backward()
        nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
        steps.step()
        steps.zero_grad()
        if choices["kill_at"] == step and begin == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if choices["kill_at"] is not None:
            with tempfile.TemporaryDirectory() as temporary:
                saved = save_checkpoint(temporary, wrapped, steps)
                if rank == 0:
                    (Path(temporary) / "step.json").write_text(json.dumps(step + 1))
                ray.train.report({"step": step + 1}, checkpoint=saved)
    found = weights(wrapped.module)
    if not choices["own"]:
        wrapped.close()
    about = {"begin": begin, "backend": dist.get_backend(), "world_size": dist.get_world_size()}
    torch.save({"found": found, "plain": plain(algorithm, task), **about}, folder / f"rank-{rank}.pt")


def fit(choices: dict[str, Any]) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder = Path(choices["folder"])
    result = TorchTrainer(
        worker,
        train_loop_config=choices,
        torch_config=TorchConfig(backend=choices["backend"]),
        scaling_config=ScalingConfig(num_workers=choices["num_workers"], use_gpu=False),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=1 if choices["kill_at"] is not None else 0),
        ),
    ).fit()
    if choices["kill_at"] is not None:
        with result.checkpoint.as_directory() as found:
            state = torch.load(Path(found) / "model.pt")
        torch.save(state, folder / "mean.pt")


def main() -> None:
    import ray

    ray.init(num_cpus=5, include_dashboard=False, logging_level="error")
    for choices in json.loads(sys.argv[1]):
        try:
            fit(choices)
        except Exception:  # told by the test of this training
            (Path(choices["folder"]) / "error.txt").write_text(traceback.format_exc())
    ray.shutdown()


if __name__ == "__main__":
    main()
