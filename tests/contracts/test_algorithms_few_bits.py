"""Training with four bits, one bit or a few elements: as simulated, to the bit; saved, resumed and counted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.catalogue import INNER, layouts, rule_of
from contracts.grids import HOSTS, SIZES, grid
from contracts.test_algorithms_state import check_resumption
from contracts.training import assert_close, by_step, regression, spread, step, train_world
from murmura import (
    DDP,
    Compressor,
    DiLoCoAlgorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    Sign,
    TopK,
    TopKTwoBit,
    Transport,
    run_world,
)
from murmura.algorithms import algorithm_named
from oracles.algorithms.few_bytes import FeedbackByStream, GatheredDiLoCo, GatheredQAdam, MajorityVote, majority
from oracles.algorithms.gradients import GatheredAllReduce, QAdam
from oracles.algorithms.simulation import Task, simulate, there_and_back
from oracles.algorithms.weights import DiLoCo, SparseLoCo
from worlds import SECONDS

STEPS = 4


@grid("name, size, bucket_size_bytes", tuple(INNER), SIZES, (10**6, 300), sample=7)
def test_gradients_with_feedback_are_as_simulated(name: str, size: int, bucket_size_bytes: int) -> None:
    task = regression("momentum", torch.float32)
    algorithm = GradientAllReduceAlgorithm(compressor=ErrorFeedback(INNER[name]()))
    runs = train_world(size, algorithm, task, STEPS, bucket_size_bytes=bucket_size_bytes)
    assert_close(by_step(runs), simulate(rule_of(name, runs, hierarchical=False), task, size, STEPS), within=0.0)


@grid("name, hosts", tuple(INNER), HOSTS, sample=8)
def test_between_hosts(name: str, hosts: Sequence[int]) -> None:
    task = regression("momentum")
    algorithm = GradientAllReduceAlgorithm(True, compressor=ErrorFeedback(INNER[name]()))
    runs = train_world(len(hosts), algorithm, task, STEPS, hosts)
    # To the bit, but that what a host of three ranks sends is multiplied and added without rounding in between.
    is_fused = INNER[name]().gathers and any(hosts.count(host) == 3 for host in hosts)
    wanted = simulate(rule_of(name, runs), task, len(hosts), STEPS, hosts)
    assert_close(by_step(runs), wanted, within=1e-9 if is_fused else 0.0)
    assert all(spread(each) == 0 for each in by_step(runs))


@pytest.mark.parametrize("size", [2, 3])
def test_a_majority_votes(size: int) -> None:
    task = regression("sgd", torch.float32)
    runs = train_world(size, "gradient_allreduce:compressor=majority_vote", task, STEPS)
    assert_close(by_step(runs), simulate(MajorityVote(), task, size, STEPS), within=0.0)


def opinions(size: int) -> list[list[float]]:
    """What ranks hold: blocks of eight that are all zeros on some or all of them, blocks that all tie, and others."""
    random = torch.Generator().manual_seed(size)
    held = torch.randint(-2, 3, (size, 24 * size), generator=random).float()
    held[: size // 2, :8] = 0
    held[:, 8:16] = 0
    held[:, -8:] = torch.tensor([1.0, -1.0]).repeat(size)[:size].view(-1, 1)
    return held.tolist()


def vote(transport: Transport) -> list[float]:
    held = opinions(transport.world_size)[transport.rank]
    algorithm = GradientAllReduceAlgorithm(compressor=Sign(8, scaled=False))
    ddp = DDP(torch.nn.Linear(len(held), 1, bias=False), transport, algorithm=algorithm)
    ddp(torch.tensor([held])).sum().backward()
    result: list[float] = ddp.module.weight.grad.view(-1).tolist()
    ddp.close()
    return result


@pytest.mark.parametrize("size", SIZES)
def test_ties_and_abstentions(size: int) -> None:
    wanted = majority(opinions(size), 8)
    assert run_world(vote, size, timeout=SECONDS) == [wanted] * size
    if size in (2, 4, 8):
        assert wanted[8:16] == wanted[-8:] == [0.0] * 8  # nobody votes, or all elements tie
    if size > 1:
        assert set(wanted) == {-1.0, 0.0, 1.0}


def votes_in_a_join(transport: Transport) -> list[list[float]]:
    """The gradients of a loop over data of which rank 2 has a batch more than the others."""
    ddp = DDP(torch.nn.Linear(3, 1, bias=False), transport, algorithm="gradient_allreduce:compressor=majority_vote")
    batches = [torch.tensor([[-1.0, -2.0, 3.0]])] * (2 if transport.rank == 2 else 1)
    found = []
    for batch in ddp.join(batches):
        ddp.zero_grad()
        ddp(batch).sum().backward()
        found.append(ddp.module.weight.grad.view(-1).tolist())
    ddp.close()
    return found


def test_ranks_that_have_run_out_of_data_do_not_vote() -> None:
    for found in run_world(votes_in_a_join, 3, timeout=SECONDS):
        assert found == [[-1.0, -1.0, 1.0], [-1.0, -1.0, 1.0]]


@pytest.mark.parametrize("name", ["topk", "randomk", "uint4"])
def test_changes_of_weights_with_few_bits(name: str) -> None:
    task = regression("adam", torch.float32)
    algorithm = DiLoCoAlgorithm(2, compressor=INNER[name]())
    runs = train_world(3, algorithm, task, STEPS)
    if name == "topk":
        q = there_and_back(INNER[name]())
        wanted = simulate(GatheredDiLoCo(2, q), task, 3, STEPS)
    else:
        streams: Any = FeedbackByStream(INNER[name])
        streams.send = lambda tensor, stream: streams.of_stream.setdefault(stream, there_and_back(INNER[name]()))(
            tensor
        )
        wanted = simulate(DiLoCo(2, q=streams), task, 3, STEPS)
    assert_close(by_step(runs), wanted, within=0.0)


def qadam_task(dtype: torch.dtype) -> Task:
    return replace(regression(dtype=dtype), make_optimizer=functools.partial(QAdamOptimizer, lr=0.01, warmup_steps=2))


@grid("name, hosts", tuple(INNER), (*([0] * size for size in SIZES), *HOSTS), sample=14)
def test_moments_with_few_bits(name: str, hosts: list[int]) -> None:
    """Not to the bit: the simulation writes Adam's step as the paper does."""
    task, size = qadam_task(torch.float64), len(hosts)
    runs = train_world(size, QAdamAlgorithm(compressor=ErrorFeedback(INNER[name]())), task, 6, hosts)
    rule: QAdam
    if INNER[name]().gathers:
        rule = GatheredQAdam(there_and_back(INNER[name]()), 2, lr=0.01, hierarchical=True)
    else:
        rule = QAdam(FeedbackByStream(INNER[name]), 2, lr=0.01, hierarchical=True)
    assert_close(by_step(runs), simulate(rule, task, size, 6, hosts))
    assert all(spread(each) == 0 for each in by_step(runs))


def freeze_for_a_while(transport: Transport) -> bool:
    """Whether what compression left over of the first layer stays when the last one is frozen, and thawed again."""
    task = qadam_task(torch.float64)
    algorithm = QAdamAlgorithm(compressor=ErrorFeedback(INNER["uint4"]()))
    ddp = DDP(task.make_model(), transport, algorithm=algorithm)
    optimizer = task.make_optimizer(ddp.parameters())
    impl: Any = ddp.algorithm
    kept = []
    prepare = impl._prepare

    def watched(*args: Any) -> None:
        before = residual() if impl._means else None
        prepare(*args)
        if before is not None:
            kept.append(torch.equal(before, residual()) and bool(before.any()))

    def residual() -> Tensor:
        return torch.cat([each.clone() for each in impl._means[0].residuals(*impl._layouts[0])["0.weight"]])

    impl._prepare = watched
    for number in range(8):
        if number in (4, 6):
            ddp.module[4].weight.requires_grad_(number == 6)
            ddp.module[4].weight.grad = None
        step(ddp, optimizer, task, number, transport.rank)
    ddp.verify_in_sync()
    ddp.close()
    return kept == [True] * 5


def test_what_moments_lost_moves_along_when_others_are_frozen_and_thawed() -> None:
    assert run_world(freeze_for_a_while, 3, timeout=SECONDS) == [True] * 3


@grid("name", ("sign", "topk"), sample=2)
def test_resumed_moments_continue_bit_for_bit(name: str) -> None:
    check_resumption(3, QAdamAlgorithm(compressor=ErrorFeedback(INNER[name]())), qadam_task(torch.float32))


@pytest.mark.parametrize("size", [2, 3])
def test_sparse_loco_is_as_the_paper_says(size: int) -> None:
    task = regression("adam")
    rule = SparseLoCo(2, 0.95, there_and_back(TopKTwoBit(16, 4)))
    name = "sparse_loco:interval=2:compressor=topk2bit(chunk_size=16:count=4:decay=0.95)"
    flats = by_step(train_world(size, name, task, 6))
    assert_close(flats, simulate(rule, task, size, 6), within=0.0)
    assert algorithm_named("sparse_loco") == DiLoCoAlgorithm(
        20, 1.0, 0.0, compressor=ErrorFeedback(TopKTwoBit(), decay=0.95)
    )


@grid("name", ("randomk", "sign", "topk", "uint4", "unscaled"))
def test_a_resumed_run_continues_bit_for_bit(name: str) -> None:
    inner = Sign(scaled=False) if name == "unscaled" else INNER[name]()
    check_resumption(3, GradientAllReduceAlgorithm(compressor=ErrorFeedback(inner)), regression("sgd", torch.float32))


@dataclass(frozen=True)
class Above(Compressor):
    """Sends all elements above a threshold: a count (int64), places (int64) and values (float64)."""

    threshold: float

    gathers = is_uneven = True

    def payload_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return 8 + 16 * numel

    def compress(self, tensor: Tensor, payload: Tensor) -> None:
        places = (tensor.abs() > self.threshold).nonzero().view(-1)
        parts = [torch.tensor([places.numel()]), places, tensor[places].double().view(torch.int64)]
        filled = torch.cat(parts).view(torch.uint8)
        payload[: filled.numel()] = filled

    def encode(self, tensor: Tensor) -> Tensor:
        payload = super().encode(tensor)
        return payload[: 8 + 16 * int(payload[:8].view(torch.int64))]

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        numbers = payload.clone()[: payload.numel() // 8 * 8].view(torch.int64)
        count = int(numbers[0])
        out.zero_()[numbers[1 : 1 + count]] = numbers[1 + count : 1 + 2 * count].view(torch.float64).to(out.dtype)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("threshold", [0.05, 1e9], ids=["some", "none"])
def test_payloads_may_be_of_any_length(size: int, threshold: float) -> None:
    task, above = regression("momentum", torch.float32), Above(threshold)
    algorithm = GradientAllReduceAlgorithm(compressor=ErrorFeedback(above))
    runs = train_world(size, algorithm, task, STEPS)
    wanted = simulate(GatheredAllReduce(there_and_back(above), layout=layouts(runs)), task, size, STEPS)
    assert_close(by_step(runs), wanted, within=0.0)


def test_threads_and_processes_agree() -> None:
    task = regression("momentum", torch.float32)
    algorithm = GradientAllReduceAlgorithm(compressor=ErrorFeedback(TopK(0.1)))
    threads, processes = (
        by_step(train_world(2, algorithm, task, STEPS, kind=kind)) for kind in ("threads", "processes")
    )
    assert_close(processes, threads, within=0.0)
