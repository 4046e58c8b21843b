"""Training under the wrapper, told step by step, on the tasks that the oracles simulate.

Everything that runs on ranks stands at the top level, so that processes can import it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.models import fill, values
from murmura import DDP, Algorithm, Transport, run_world
from oracles.algorithms.simulation import Shard, Task, flat_of
from worlds import SECONDS


def perceptron(dtype: torch.dtype = torch.float64) -> nn.Module:
    """259 parameters, equal on every call."""
    layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    return fill(layers).to(dtype)


def different_data(dtype: torch.dtype, round_: int, micro: int, rank: int) -> Shard:
    """Every rank learns another thing, so that replicas which do not communicate drift apart."""
    seed = 10_000 * round_ + 100 * micro + rank
    return values(4, 5, seed=seed, dtype=dtype), values(4, 3, seed=seed + 50, dtype=dtype) + rank


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


OPTIMIZERS = {"sgd": sgd, "momentum": momentum, "adam": adam}


def regression(optimizer: str = "sgd", dtype: torch.dtype = torch.float64, **choices: Any) -> Task:
    """The task of most tests."""
    return Task(
        functools.partial(perceptron, dtype), OPTIMIZERS[optimizer], functools.partial(different_data, dtype), **choices
    )


def no_steps(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def standing_still(dtype: torch.dtype = torch.float64) -> Task:
    """Optimizers that change nothing: what is seen is the algorithm alone."""
    return replace(regression(dtype=dtype), make_optimizer=no_steps)


@torch.no_grad()
def scatter(model: nn.Module, rank: int) -> None:
    """Move the weights to somewhere that depends on the rank."""
    for number, parameter in enumerate(model.parameters()):
        noise = values(*parameter.shape, seed=1000 * (rank + 1) + number, dtype=torch.float64)
        parameter.add_(noise.to(parameter.dtype))


@dataclass
class Run:
    """What one rank saw: its flat, its buckets and `observed` after every step."""

    flats: list[Tensor] = field(default_factory=list)
    layouts: list[list[list[str]]] = field(default_factory=list)
    observed: list[Any] = field(default_factory=list)


def train(
    transport: Transport,
    algorithm: Algorithm | str,
    task: Task,
    steps: int,
    skips: Collection[tuple[int, int]] = (),
    begin: Callable[[nn.Module, int], None] | None = None,
    observe: Callable[[DDP], Any] | None = None,
    bucket_size_bytes: int = 25 * 2**20,
) -> Run:
    """The loop of a user, on one rank; see `simulate` for `skips` and `begin`."""
    ddp = DDP(task.make_model(), transport, algorithm=algorithm, bucket_size_bytes=bucket_size_bytes)
    optimizer = task.make_optimizer(ddp.parameters())
    run = Run()
    if begin is not None:
        begin(ddp.module, transport.rank)
    for number in range(steps):
        run.layouts.append([list(bucket.names) for bucket in ddp._replica.buckets])
        step(ddp, optimizer, task, number, transport.rank, skip=(number, transport.rank) in skips)
        run.flats.append(flat_of(ddp.module))
        if observe is not None:
            run.observed.append(observe(ddp))
    ddp.close()
    return run


def step(ddp: DDP, optimizer: Optimizer, task: Task, number: int, rank: int, *, skip: bool = False) -> None:
    """One round and, unless `skip`, one step."""
    optimizer.zero_grad()
    task.backward(ddp, number, rank, ddp.no_sync)
    task.limit(ddp)
    if not skip:
        optimizer.step()


def train_world(
    size: int,
    algorithm: Algorithm | str,
    task: Task,
    steps: int,
    hosts: Sequence[int] | None = None,
    *,
    kind: str = "threads",
    **choices: Any,
) -> list[Run]:
    """`train` on every rank of a new world."""
    rank = functools.partial(train, algorithm=algorithm, task=task, steps=steps, **choices)
    return run_world(rank, size, kind=kind, hosts=hosts, timeout=SECONDS)


def by_step(runs: Sequence[Run]) -> list[list[Tensor]]:
    """The flats by step and rank, as the oracles tell them."""
    return [list(each) for each in zip(*(run.flats for run in runs), strict=True)]


def assert_close(
    got: Sequence[Sequence[Tensor]],
    wanted: Sequence[Sequence[Tensor]],
    within: float = 1e-9,
    but: Collection[tuple[int, int]] = (),
) -> None:
    """Every step of every rank is as simulated, but for the (step, rank) named."""
    assert len(got) == len(wanted)
    for number, (flats, others) in enumerate(zip(got, wanted, strict=True)):
        for rank, (flat, other) in enumerate(zip(flats, others, strict=True)):
            if (number, rank) not in but:
                distance = float((flat - other).abs().max())
                assert distance <= within, f"rank {rank} is off by {distance:.1e} after step {number}"


def spread(flats: Sequence[Tensor]) -> float:
    """How far apart the replicas are: a test that compares equal ones would prove nothing."""
    return max(float((flat - flats[0]).abs().max()) for flat in flats)
