"""Training with four bits, one bit or a few elements: as simulated, to the bit; saved, resumed and counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.catalogue import layouts
from contracts.grids import HOSTS, SIZES, grid
from contracts.test_algorithms_state import check_resumption
from contracts.training import assert_close, by_step, regression, spread, step, train_world
from murmura import (
    DDP,
    Compressor,
    DiLoCoAlgorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    MinMaxUInt4,
    QAdamAlgorithm,
    QAdamOptimizer,
    RandomK,
    Sign,
    TopK,
    TopKTwoBit,
    Transport,
    run_world,
)
from murmura.algorithms import algorithm_named
from oracles.algorithms.gradients import AllReduce, GatheredAllReduce, QAdam
from oracles.algorithms.simulation import Feedback, Rule, Task, simulate, there_and_back
from oracles.algorithms.weights import DiLoCo, SparseLoCo
from worlds import SECONDS

STEPS = 4


class FeedbackByStream(Feedback):
    """Where each stream has an encoder of its own, which counts what it sends."""

    def __init__(self, make: Callable[[], Compressor]) -> None:
        super().__init__(torch.clone)
        self.make, self.of_stream = make, {}  # type: ignore[var-annotated]

    def send(self, tensor: Tensor, stream: Hashable) -> Tensor:
        self.q = self.of_stream.setdefault(stream, there_and_back(self.make()))
        return super().send(tensor, stream)


INNER: dict[str, Callable[[], Compressor]] = {
    "uint4": lambda: MinMaxUInt4(16),
    "sign": lambda: Sign(16),
    "topk": lambda: TopK(0.1),
    "randomk": lambda: RandomK(0.2),
}


def rule_of(name: str, runs: Sequence[Any], hierarchical: bool = False) -> Rule:
    if name == "topk":
        return GatheredAllReduce(there_and_back(INNER[name]()), hierarchical, layouts(runs))
    return AllReduce(q=FeedbackByStream(INNER[name]), hierarchical=hierarchical, layout=layouts(runs))


@grid("name, size, bucket_size_bytes", tuple(INNER), SIZES, (10**6, 300), sample=8)
def test_gradients_with_feedback_are_as_simulated(name: str, size: int, bucket_size_bytes: int) -> None:
    task = regression("momentum", torch.float32)
    algorithm = GradientAllReduceAlgorithm(compressor=ErrorFeedback(INNER[name]()))
    runs = train_world(size, algorithm, task, STEPS, bucket_size_bytes=bucket_size_bytes)
    assert_close(by_step(runs), simulate(rule_of(name, runs), task, size, STEPS), within=0.0)


@grid("name, hosts", tuple(INNER), HOSTS, sample=8)
def test_between_hosts(name: str, hosts: Sequence[int]) -> None:
    task = regression("momentum")
    algorithm = GradientAllReduceAlgorithm(True, compressor=ErrorFeedback(INNER[name]()))
    runs = train_world(len(hosts), algorithm, task, STEPS, hosts)
    assert_close(by_step(runs), simulate(rule_of(name, runs, True), task, len(hosts), STEPS, hosts))
    assert all(spread(each) == 0 for each in by_step(runs))


@pytest.mark.parametrize("size", [2, 3])
def test_a_majority_votes(size: int) -> None:
    task = regression("sgd", torch.float32)
    runs = train_world(size, "gradient_allreduce:compressor=majority_vote", task, STEPS)

    def vote(gradients: Sequence[Tensor]) -> Tensor:
        return torch.where(sum(torch.where(each >= 0, 1.0, -1.0) for each in gradients) >= 0, 1.0, -1.0)  # type: ignore[arg-type]

    class MajorityVote(Rule):
        takes_buffers_of_rank_0 = True

        def after_backward(self, replicas: Any) -> None:
            for parameters in zip(*(model.parameters() for model in replicas.models), strict=True):
                voted = vote([each.grad for each in parameters])
                for each in parameters:
                    each.grad = voted.clone()

    assert_close(by_step(runs), simulate(MajorityVote(), task, size, STEPS), within=0.0)


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
    assert_close(by_step(runs), wanted, within=1e-6)  # the order of the outer step's operations differs


class GatheredDiLoCo(DiLoCo):
    """As DiLoCo, with mean q(theta - x)."""

    def __init__(self, interval: int, q: Any) -> None:
        super().__init__(interval)
        self.gathered = q

    def after_step(self, replicas: Any) -> None:
        if (replicas.round + 1) % self.interval == 0:
            length, flats = replicas.num_parameters(), replicas.flats()
            replicas.set(
                torch.cat([self.theta - self.gathered(self.theta - flat[:length]), flat[length:]]) for flat in flats
            )
        super().after_step(replicas)


def qadam_task(dtype: torch.dtype) -> Task:
    return replace(regression(dtype=dtype), make_optimizer=functools.partial(QAdamOptimizer, lr=0.01, warmup_steps=2))


@grid("name, hosts", ("sign", "uint4", "randomk"), (None, [0, 0, 1]), sample=3)
def test_moments_with_few_bits(name: str, hosts: list[int] | None) -> None:
    task = qadam_task(torch.float64)
    runs = train_world(3, QAdamAlgorithm(compressor=ErrorFeedback(INNER[name]())), task, 6, hosts)
    rule = QAdam(FeedbackByStream(INNER[name]), 2, lr=0.01, hierarchical=True)
    assert_close(by_step(runs), simulate(rule, task, 3, 6, hosts))
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
    assert_close(flats, simulate(rule, task, size, 6))
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
