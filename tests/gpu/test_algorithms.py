"""Every algorithm on CUDA tensors, several ranks on one GPU, beside its simulation on the CPU.

Long kernels are queued before every forward and every step: an exchange that did not wait for them, or that they did
not wait for, would read or leave other weights.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from contracts.catalogue import CATALOGUE, EVERYTHING
from contracts.training import Run, Task, assert_close, by_step, regression, train
from murmura import Transport, run_world
from oracles.algorithms.simulation import simulate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

STEPS = 7
BY_NAME = {entry.name: entry for entry in EVERYTHING}
WORLDS: dict[str, dict[str, Any]] = {
    "threads": {"kind": "threads"},
    "shared_memory": {"kind": "processes"},
    "gloo": {"kind": "processes", "transport": "gloo"},
    "nccl": {"kind": "processes", "transport": "nccl"},
}
QUANTISED = {"low_precision_decentralized", "bytegrad", "qadam"}
ONE_LEVEL = 0.02  # of the quantiser, on the weights and gradients of this task: the GPU rounds otherwise than the CPU


def busy() -> None:
    """Keep the stream occupied for about 10 ms."""
    torch.cuda._sleep(20_000_000)


class OnTheGPU(Task):
    """The same task with model and data on the GPU, behind long kernels.

    Backward runs in the device's thread, as it does for users. Ranks that are threads share that one, so there it runs
    in their own.
    """

    def backward(
        self,
        model: nn.Module,
        round_: int,
        rank: int,
        no_sync: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        busy()
        with torch.autograd.set_multithreading_enabled(threading.current_thread() is threading.main_thread()):
            super().backward(model, round_, rank, no_sync)
        busy()


def on_the_gpu(task: Task) -> Task:
    return OnTheGPU(
        functools.partial(_model, task),
        functools.partial(_optimizer, task),
        functools.partial(_shard, task),
        accumulate=task.accumulate,
        clip=task.clip,
    )


def _model(task: Task) -> nn.Module:
    return task.make_model().cuda()


def _optimizer(task: Task, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return task.make_optimizer(parameters)


def _shard(task: Task, round_: int, micro: int, rank: int) -> Any:
    return tuple(each.cuda() for each in task.shard(round_, micro, rank))


def train_one(transport: Transport, name: str, hosts: Sequence[int] | None = None) -> Run:
    """What a rank sees of the entry `name`; `hosts` pretends that there are several."""
    entry, before = BY_NAME[name], transport.hosts
    transport.hosts = before if hosts is None else hosts
    try:
        run = train(transport, entry.make(), on_the_gpu(entry.fit(regression("momentum"))), STEPS)
    finally:
        transport.hosts = before
    return replace(run, flats=[flat.cpu() for flat in run.flats])


def check(name: str, runs: Sequence[Run], hosts: Sequence[int] | None = None) -> None:
    """Every step is as simulated on the CPU, and replicas that must be equal are."""
    entry = BY_NAME[name]
    wanted = simulate(entry.rule(runs), entry.fit(regression("momentum")), len(runs), STEPS, hosts)
    try:
        assert_close(by_step(runs), wanted, ONE_LEVEL if name in QUANTISED else 1e-9)
    except AssertionError as error:
        error.add_note(f"It was {name}.")
        raise
    if entry.lockstep:
        assert all(torch.equal(run.flats[-1], runs[0].flats[-1]) for run in runs), name


def train_all(transport: Transport) -> list[Run]:
    """One world for all: worlds of processes take long to start."""
    return [train_one(transport, entry.name) for entry in CATALOGUE]


@pytest.mark.parametrize("world", WORLDS)
def test_every_algorithm_on_the_gpu_is_as_simulated_on_the_cpu(world: str) -> None:
    size = 1 if world == "nccl" else 3  # NCCL wants a GPU for each rank
    by_rank = run_world(train_all, size, timeout=60, **WORLDS[world])
    for entry, runs in zip(CATALOGUE, zip(*by_rank, strict=True), strict=True):
        check(entry.name, runs)
