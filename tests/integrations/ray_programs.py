"""Trainings on a local Ray cluster, run as a program of its own: ``python -m integrations.ray_programs CHOICES``.

CHOICES is a list in JSON, with an object for each job; what its workers found is written to files in its folder.
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
from torch import Tensor, nn

from integrations.loops import ALGORITHMS, CLIP, Task, autocast, batches, model, optimizer, plain, weights

COMPARED = {
    "gradients": ("gradient_allreduce", Task(accumulate=4)),
    "gradients, Ray's own": ("gradient_allreduce", Task(accumulate=4)),
    "gradients, bf16": ("gradient_allreduce", Task(accumulate=4, precision="bf16")),
    "low precision": ("low_precision_decentralized", Task(accumulate=4)),
    "low precision, bf16": ("low_precision_decentralized", Task(accumulate=4, precision="bf16")),
    "diloco": ("diloco", Task(accumulate=4)),
    "diloco, bf16": ("diloco", Task(accumulate=4, precision="bf16")),
}


def step_on(wrapped: Any, steps: Any, mine: list[Any], task: Task) -> None:
    """One step of the optimizer on as many batches as are accumulated."""
    for index, (inputs, targets) in enumerate(mine, 1):
        wrapped.require_backward_grad_sync = index == task.accumulate
        with autocast("cpu", task.precision):
            outputs = wrapped(inputs)
        (nn.functional.mse_loss(outputs.to(task.dtype), targets) / task.accumulate).backward()
    nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
    steps.step()
    steps.zero_grad()


def trained(name: str) -> list[Tensor]:
    import ray.train.torch

    from murmura.integrations.ray import prepare_model

    _, task = COMPARED[name]
    is_rays = name.endswith("Ray's own")
    wrapped: Any = (
        ray.train.torch.prepare_model(model(task))
        if is_rays
        else prepare_model(model(task), algorithm=algorithm_of(name))
    )
    steps, mine = optimizer(wrapped.parameters()), batches(task)
    for step in range(task.steps):
        step_on(wrapped, steps, mine[step * task.accumulate : (step + 1) * task.accumulate], task)
    found = weights(wrapped.module)
    if not is_rays:
        wrapped.close()
    return found


def algorithm_of(name: str) -> Any:
    return ALGORITHMS[COMPARED[name][0]]


def compare(choices: dict[str, Any]) -> None:
    """The weights after training in a worker, and after the plain loop, for all of `COMPARED`, and what is refused."""
    torch.set_num_threads(1)
    pairs = {name: (trained(name), plain(algorithm_of(name), task)) for name, (_, task) in COMPARED.items()}
    saved = {"pairs": pairs, "backend": dist.get_backend(), "world_size": dist.get_world_size()}
    saved["refused"] = refusals()
    torch.save(saved, Path(choices["folder"]) / f"rank-{dist.get_rank()}.pt")


def refusals() -> list[str]:
    """What is told where a model is wrapped by Ray before, and by Ray on top."""
    import ray.train.torch

    from murmura import UsageError
    from murmura.integrations.ray import prepare_model

    told = []
    wrapped = prepare_model(model(Task()))
    for wrap in (lambda: prepare_model(ray.train.torch.prepare_model(model(Task()))), lambda: prepare_model(wrapped)):
        try:
            wrap()
        except UsageError as error:
            told.append(str(error))
    wrapped.close()
    return told


def wrong_values() -> list[str]:
    """What is told of a bare model, and of a run that has no checkpoint yet; no cluster is needed."""
    import ray.train

    from murmura.integrations.ray import load_checkpoint, save_checkpoint

    bare: Any = nn.Linear(1, 1)
    nothing: Any = None
    told = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ray.train.Checkpoint.from_directory(folder)
        for work in (
            lambda: save_checkpoint(folder, bare),
            lambda: load_checkpoint(checkpoint, bare),
            lambda: load_checkpoint(nothing, bare),
        ):
            try:
                work()
            except TypeError as error:
                told.append(str(error))
    return told


def survive(choices: dict[str, Any]) -> None:
    """Train as Ray's own examples do, with a checkpoint after every step; rank 1 is killed by a signal once."""
    import ray.train

    from murmura.integrations.ray import load_checkpoint, prepare_model, save_checkpoint

    torch.set_num_threads(1)
    folder, task, algorithm = Path(choices["folder"]), Task(accumulate=4), ALGORITHMS[choices["algorithm"]]
    rank, begin = ray.train.get_context().get_world_rank(), 0
    wrapped = prepare_model(model(task), algorithm=algorithm)
    steps, mine = optimizer(wrapped.parameters()), batches(task)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        load_checkpoint(checkpoint, wrapped, steps)
        with checkpoint.as_directory() as found:
            begin = json.loads((Path(found) / "step.json").read_text())
            (folder / f"files-{rank}.json").write_text(json.dumps(sorted(os.listdir(found))))
    for step in range(begin, task.steps):
        step_on(wrapped, steps, mine[step * task.accumulate : (step + 1) * task.accumulate], task)
        if step == 4 and begin == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as temporary:
            saved = save_checkpoint(temporary, wrapped, steps)
            if rank == 0:
                (Path(temporary) / "step.json").write_text(json.dumps(step + 1))
            ray.train.report({"step": step + 1}, checkpoint=saved)
    own = weights(wrapped.module)
    wrapped.close()
    torch.save({"pair": (own, plain(algorithm, task)), "begin": begin}, folder / f"rank-{rank}.pt")


def fit(choices: dict[str, Any]) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder = Path(choices["folder"])
    is_killed = choices["algorithm"] is not None
    result = TorchTrainer(
        survive if is_killed else compare,
        train_loop_config=choices,
        torch_config=TorchConfig(backend=choices["backend"]),
        scaling_config=ScalingConfig(num_workers=choices["num_workers"], use_gpu=False),
        run_config=RunConfig(
            name="run", storage_path=str(folder / "storage"), failure_config=FailureConfig(max_failures=int(is_killed))
        ),
    ).fit()
    if is_killed:
        with result.checkpoint.as_directory() as found:
            state = torch.load(Path(found) / "model.pt")
        torch.save(state, folder / "mean.pt")


def main() -> None:
    import ray

    ray.init(num_cpus=5, include_dashboard=False, logging_level="error")
    for choices in json.loads(sys.argv[1]):
        try:
            fit(choices)
        except Exception:  # told by the test of this job
            (Path(choices["folder"]) / "error.txt").write_text(traceback.format_exc())
    ray.shutdown()


if __name__ == "__main__":
    main()
