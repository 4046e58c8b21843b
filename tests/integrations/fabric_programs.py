"""What the tests of Fabric run on ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn

from integrations import lightning_task as loops
from integrations.lightning_task import Options, Weights
from murmura import CheckpointError, UsageError
from murmura.integrations.lightning import MurmuraFabricStrategy, ddp_of


def fabric(strategy: Any, options: Options = Options(), **others: Any) -> Fabric:  # noqa: B008
    place = {"accelerator": "cpu", "devices": dist.get_world_size(), **others}
    return Fabric(strategy=strategy, precision=options.precision, **place)


def train(run: Fabric, model: Any, optimizer: Any, options: Options, first: int = 0, last: int | None = None) -> None:
    """The steps of the plain loop, as Fabric writes them, from `first` to before `last`."""
    inputs, targets = (each.to(run.device) for each in loops.dataset(options).tensors)
    batches = list(zip(inputs.split(loops.BATCH), targets.split(loops.BATCH), strict=True))
    for index, batch in enumerate(batches[first:last], first + 1):
        syncs = index % options.accumulate == 0
        with run.no_backward_sync(model, enabled=not syncs):
            run.backward(loops.loss_of(model, *batch) / options.accumulate)
        if syncs:
            if options.clip is not None:
                run.clip_gradients(model, optimizer, max_norm=options.clip)
            optimizer.step()
            optimizer.zero_grad()


def fit(strategy: Any, options: Options, **others: Any) -> Weights:
    run = fabric(strategy, options, **others)
    run.launch()
    module = loops.net()
    model, optimizer = run.setup(module, loops.optimizer(module))
    train(run, model, optimizer, options)
    result = loops.weights(module)
    run.strategy.teardown()
    return result


def against_the_plain_loop(name: str) -> dict[str, Any]:
    """By options: the weights of the plain loop, those with Fabric, and those of its own strategy."""
    return {
        case: (
            loops.train(name, options),
            fit(MurmuraFabricStrategy(loops.algorithm(name)), options),
            fit("ddp", options) if name == "gradient_allreduce" else None,
        )
        for case, options in loops.OPTIONS.items()
    }


def begin(name: str) -> tuple[Fabric, nn.Module, Any, Any]:
    run = fabric(MurmuraFabricStrategy(loops.algorithm(name)))
    run.launch()
    module = nn.Sequential(nn.BatchNorm1d(6), *loops.net())
    return run, module, *run.setup(module, torch.optim.Adam(module.parameters(), lr=0.01))


def resumed(name: str, folder: str) -> dict[str, Any]:
    """Own weights of a whole run, and of one that was saved in its middle and loaded into new objects."""
    options = Options()
    run, module, model, optimizer = begin(name)
    train(run, model, optimizer, options, 0, 11)
    path = f"{folder}/checkpoint.ckpt"
    run.save(path, {"model": model, "optimizer": optimizer, "step": 11 + dist.get_rank()})
    at_save = loops.weights(module)
    with ddp_of(model).average_parameters():
        mean = loops.weights(module)
    train(run, model, optimizer, options, 11)
    whole = loops.weights(module)
    run.strategy.teardown()

    again, other, model, optimizer = begin(name)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = again.load(path, state)
    assert rest == {}
    train(again, model, optimizer, options, 11)
    result = loops.weights(other)
    plain = again.load(path)
    again.strategy.teardown()
    return {
        "whole": whole,
        "resumed": result,
        "at_save": at_save,
        "mean": mean,
        "plain": plain["model"],
        "keys": sorted(plain),
        "step": state["step"],
    }


KILLED = loops.OPTIONS["everything"]  # each step has four batches


def killed(name: str, folder: str) -> None:
    """Save after step 11; rank 1 is killed by a signal three batches later."""
    run, _, model, optimizer = begin(name)
    train(run, model, optimizer, KILLED, 0, 44)
    run.save(f"{folder}/checkpoint.ckpt", {"model": model, "optimizer": optimizer})
    train(run, model, optimizer, KILLED, 44, 47)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(run, model, optimizer, KILLED, 47)


def from_the_file(name: str, path: str | None) -> Weights:
    """Own weights at the end, from the beginning or from a checkpoint after step 11."""
    run, module, model, optimizer = begin(name)
    if path is not None:
        run.load(path, {"model": model, "optimizer": optimizer})
    train(run, model, optimizer, KILLED, 0 if path is None else 44)
    result = loops.weights(module)
    run.strategy.teardown()
    return result


def moments_after_a_change(folder: str) -> list[Any]:
    """Adam's moments on this rank when a run was resumed and has changed its algorithm, before a step."""
    run, _, model, optimizer = begin("phased")
    train(run, model, optimizer, Options(), 0, 11)
    path = f"{folder}/checkpoint.ckpt"
    run.save(path, {"model": model, "optimizer": optimizer})
    before = [each["exp_avg"].clone() for each in optimizer.state_dict()["state"].values()]
    run.strategy.teardown()
    again, _, model, optimizer = begin("phased")
    again.load(path, {"model": model, "optimizer": optimizer})
    again.backward(model(torch.randn(2, 6)).sum())
    after = [each["exp_avg"].clone() for each in optimizer.state_dict()["state"].values()]
    again.strategy.teardown()
    return [before, after]


def changed_algorithm(folder: str) -> str:
    """What is told who loads into another algorithm."""
    path = f"{folder}/checkpoint.ckpt"
    run, _, model, _ = begin("diloco")
    run.save(path, {"model": model})
    run.strategy.teardown()
    run, _, model, _ = begin("gradient_allreduce")
    try:
        run.load(path, {"model": model})
    except CheckpointError as error:
        return str(error)
    finally:
        run.strategy.teardown()
    return "nothing"


def two_models() -> list[Weights]:
    """Two models with one optimizer each, trained in turn."""
    run = fabric("murmura_low_precision_decentralized")
    run.launch()
    modules = [loops.net(), loops.net()]
    pairs = [run.setup(module, loops.optimizer(module)) for module in modules]
    for inputs, targets in [loops.dataset(Options(steps=1)).tensors] * 5:
        for model, optimizer in pairs:
            run.backward(loops.loss_of(model, inputs, targets))
            optimizer.step()
            optimizer.zero_grad()
        assert run.all_reduce(torch.tensor(3 + dist.get_rank())).item() == 3  # an integer's mean, rounded down
        run.barrier()
    result = [loops.weights(module) for module in modules]
    run.strategy.teardown()
    return result


def refusals() -> list[str]:
    told = []
    arguments: dict[str, Any]
    for arguments in (
        {"algorithm": "sharding"},
        {"algorithm": 3},
        {"transport": None},
        {"shards": 3},
        {"bucket_size_bytes": -1},
        {"timeout": -1},
    ):
        try:
            MurmuraFabricStrategy(**arguments)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    try:
        ddp_of(nn.Linear(1, 1))
    except UsageError as error:
        told.append(str(error))
    return told
