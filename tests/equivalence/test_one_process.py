"""Training on many ranks arrives where one process arrives that sees all the data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp.models import all_equal, digest, weights_of
from equivalence.cases import Case, loss_of
from murmura import DDP, Transport, run_world
from oracles import ddp as oracle
from worlds import SECONDS

WORLDS = {"threads": ("threads", None), "processes": ("processes", None), "gloo": ("processes", "gloo")}
OPTIMIZERS = ("sgd", "momentum", "adamw")
EVERYTHING = tuple(Case(model, optimizer) for model in ("mlp", "transformer") for optimizer in OPTIMIZERS)

# A process takes seconds to load torch, so that one world trains several cases. The whole grid is slow, and so are
# a hundred steps: thirty show a gradient that is wrong, and moments that are.
NUM_STEPS = 30
QUICK = [
    *(
        ("threads", num_ranks, tuple(Case("mlp", optimizer, num_steps=NUM_STEPS) for optimizer in OPTIMIZERS))
        for num_ranks in (2, 3, 4)
    ),
    ("threads", 2, (Case("transformer", "sgd", num_steps=NUM_STEPS),)),
    ("threads", 3, (Case("transformer", "adamw", num_steps=NUM_STEPS),)),
    ("gloo", 3, (Case("mlp", "adamw", num_steps=NUM_STEPS), Case("transformer", "momentum", num_steps=NUM_STEPS))),
]
SLOW = [
    pytest.param(world, num_ranks, EVERYTHING, marks=pytest.mark.slow)
    for world, num_ranks in itertools.product(WORLDS, (2, 3, 4))
]


def ids(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def train(transport: Transport, case: Case) -> tuple[list[Tensor], list[str]]:
    """The weights after each step, and a digest of the gradients that led there."""
    ddp = DDP(case.make_model(seed=transport.rank), transport, bucket_size_bytes=case.bucket_bytes)
    optimizer = case.make_optimizer(ddp)
    weights, digests = [], []
    for step in range(case.num_steps):
        optimizer.zero_grad()
        loss_of(ddp, case.shard(step, transport.rank)).backward()
        digests.append(digest(parameter.grad for parameter in ddp.parameters()))
        optimizer.step()
        weights.append(weights_of(ddp.module))
    ddp.verify_in_sync()
    ddp.close()
    return weights, digests


def train_all(transport: Transport, cases: Sequence[Case]) -> list[tuple[list[Tensor], list[str]]]:
    return [train(transport, case) for case in cases]


def run(world: str, num_ranks: int, cases: Sequence[Case], fn: Callable[..., Any] = train_all) -> list[list[Any]]:
    """What every rank returned, by case."""
    kind, transport = WORLDS[world]
    results = run_world(fn, num_ranks, cases, kind=kind, transport=transport, timeout=SECONDS)
    return [list(of_ranks) for of_ranks in zip(*results, strict=True)]


def train_alone(case: Case, num_ranks: int) -> list[Tensor]:
    model = case.make_model()
    return oracle.train_on_whole_batches(model, case.make_optimizer(model), case.steps(num_ranks), loss_of)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "num_ranks", "cases"), [*QUICK, *SLOW], ids=ids)
def test_weights_equal_those_of_one_process(world: str, num_ranks: int, cases: Sequence[Case]) -> None:
    for case, results in zip(cases, run(world, num_ranks, cases), strict=True):
        assert all_equal(results)
        weights, _ = results[0]
        assert (weights[0] - weights[-1]).abs().max() > 0.01  # it has learned something
        wanted = train_alone(case, num_ranks)
        assert len(weights) == len(wanted) == case.num_steps
        torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_in_single_precision_ranks_agree_to_the_bit_and_sgd_stays_close(num_ranks: int) -> None:
    cases = [Case(model, "sgd", dtype=torch.float32, num_steps=NUM_STEPS) for model in ("mlp", "transformer")]
    for case, results in zip(cases, run("threads", num_ranks, cases), strict=True):
        assert all_equal(results)
        torch.testing.assert_close(results[0][0], train_alone(case, num_ranks), rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_in_single_precision_ranks_agree_to_the_bit_with_every_optimizer(optimizer: str) -> None:
    (results,) = run("threads", 3, [Case("transformer", optimizer, dtype=torch.float32, num_steps=NUM_STEPS)])
    assert all_equal(results)


def test_threads_and_processes_agree_to_the_bit() -> None:
    """And so processes arrive where threads do, in double precision at the weights of one process."""
    cases = [
        Case("mlp", "momentum", num_steps=NUM_STEPS),
        Case("transformer", "adamw", num_steps=NUM_STEPS),
        Case("transformer", "adamw", dtype=torch.float32, num_steps=20),
        Case("mlp", "momentum", dtype=torch.bfloat16, num_steps=20),
        Case("mlp", "momentum", dtype=torch.float16, num_steps=20),
    ]
    in_both = zip(cases, run("threads", 3, cases), run("processes", 3, cases), strict=True)
    for case, in_threads, in_processes in in_both:
        assert all_equal([*in_threads, *in_processes])
        if case.dtype == torch.float64:
            torch.testing.assert_close(in_processes[0][0], train_alone(case, 3), rtol=0, atol=1e-9)


def test_the_number_of_buckets_changes_no_bit() -> None:
    """Sums are made in rank order up to 256 KiB, whatever else travels in the bucket."""
    cases = [Case("transformer", "momentum", torch.float32, 20, size) for size in (1, 300, 3000, 2**20)]
    assert all_equal(result for results in run("threads", 3, cases) for result in results)


def train_with_norm(transport: Transport, cases: Sequence[Case]) -> list[tuple[list[Tensor], list[dict[str, Tensor]]]]:
    """By case, the weights after each step and this rank's buffers then."""
    seen = []
    for case in cases:
        ddp = DDP(case.make_model(), transport, bucket_size_bytes=case.bucket_bytes)
        optimizer = case.make_optimizer(ddp)
        weights, buffers = [], []
        for step in range(case.num_steps):
            optimizer.zero_grad()
            loss_of(ddp, case.shard(step, transport.rank)).backward()
            optimizer.step()
            weights.append(weights_of(ddp.module))
            buffers.append({name: buffer.clone() for name, buffer in ddp.module.named_buffers()})
        ddp.close()
        seen.append((weights, buffers))
    return seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "num_ranks", "optimizers", "num_steps"),
    [
        ("threads", 2, ["sgd"], NUM_STEPS),
        ("threads", 3, ["adamw"], NUM_STEPS),
        *(pytest.param(world, 3, OPTIMIZERS, 100, marks=pytest.mark.slow) for world in WORLDS),
    ],
)
def test_batch_norm_equals_shards_run_one_by_one(
    world: str, num_ranks: int, optimizers: Sequence[str], num_steps: int
) -> None:
    cases = [Case("cnn", optimizer, num_steps=num_steps) for optimizer in optimizers]
    for case, results in zip(cases, run(world, num_ranks, cases, train_with_norm), strict=True):
        model = case.make_model()
        weights, buffers = oracle.train_on_shards(model, case.make_optimizer(model), case.steps(num_ranks), loss_of)
        assert all_equal(weights for weights, _ in results)
        torch.testing.assert_close(results[0][0], weights, rtol=0, atol=1e-9)
        for rank, (_, own) in enumerate(results):
            torch.testing.assert_close(own, [step[rank] for step in buffers], rtol=0, atol=1e-9)
