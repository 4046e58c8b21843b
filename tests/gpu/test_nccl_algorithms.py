"""Every algorithm on NCCL beside its simulation, and a host that waits for none of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import murmura
from contracts import test_algorithms_uneven
from contracts.catalogue import CATALOGUE, FEW_BYTES
from contracts.test_algorithms_few_bits import INNER, FeedbackByStream, qadam_task, rule_of
from contracts.training import Run, Task, assert_close, by_step, regression, train
from gpu.test_algorithms import ONE_LEVEL, QUANTISED, STEPS, on_the_gpu, train_all
from murmura import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    Cast,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    PushSumAlgorithm,
    QAdamAlgorithm,
    StreamingDiLoCoAlgorithm,
    TopKTwoBit,
    Transport,
)
from murmura.algorithms import algorithm_named
from murmura.tools.one_gpu import OneGPU
from oracles.algorithms.gradients import AllReduce, QAdam
from oracles.algorithms.simulation import Rule, simulate, there_and_back
from oracles.algorithms.weights import SparseLoCo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

KERNEL_CYCLES = 600_000_000  # about 300 ms
HOST_SECONDS = 0.05
FREE: dict[str, Callable[[], Algorithm]] = {
    "gradient_allreduce": GradientAllReduceAlgorithm,
    "cast": lambda: GradientAllReduceAlgorithm(compressor=Cast(torch.bfloat16)),
    "bytegrad": ByteGradAlgorithm,
    "decentralized": DecentralizedAlgorithm,
    "shift_one": lambda: DecentralizedAlgorithm(True, "shift_one", 1),
    "low_precision_decentralized": LowPrecisionDecentralizedAlgorithm,
    "local_sgd": lambda: LocalSGDAlgorithm(1),
    "diloco": lambda: DiLoCoAlgorithm(1),
    "streaming_diloco": lambda: StreamingDiLoCoAlgorithm(1, fragments=1, overlap=1, compressor="uint8"),
    "async_by_rounds": lambda: AsyncModelAverageAlgorithm(sync_interval_rounds=1),
    "async_by_the_clock": lambda: AsyncModelAverageAlgorithm(sync_interval_ms=20),
    "powersgd": PowerSGDAlgorithm,
    "push_sum": PushSumAlgorithm,
    "uint4": lambda: algorithm_named("gradient_allreduce:compressor=uint4"),
    "sign": lambda: algorithm_named("gradient_allreduce:compressor=sign"),
    "topk": lambda: algorithm_named("gradient_allreduce:compressor=topk"),
    "majority_vote": lambda: algorithm_named("gradient_allreduce:compressor=majority_vote"),
    "sparse_loco": lambda: algorithm_named("sparse_loco:interval=1"),
}


def test_every_algorithm_is_as_simulated(nccl: OneGPU) -> None:
    by_rank = nccl.run(train_all)
    for entry, runs in zip(CATALOGUE, zip(*by_rank, strict=True), strict=True):
        wanted = simulate(entry.rule(runs), entry.fit(regression("momentum")), nccl.num_ranks, STEPS)
        assert_close(by_step(runs), wanted, ONE_LEVEL if entry.name in QUANTISED else 1e-9)
        if entry.lockstep:
            assert all(torch.equal(run.flats[-1], runs[0].flats[-1]) for run in runs), entry.name


FROM_CATALOGUE = {
    entry.name: entry for entry in FEW_BYTES if entry.name in ("majority_vote", "streaming_uint4", "average_moments")
}
FEW_BITS = {
    **{name: entry.make() for name, entry in FROM_CATALOGUE.items()},
    **{name: GradientAllReduceAlgorithm(compressor=ErrorFeedback(make())) for name, make in INNER.items()},
    "sparse_loco": algorithm_named("sparse_loco:interval=2:compressor=topk2bit(chunk_size=16:count=4:decay=0.95)"),
    "qadam": QAdamAlgorithm(compressor=ErrorFeedback(INNER["sign"]())),
}


def few_bits_task(name: str) -> Task:
    return qadam_task(torch.float64) if name == "qadam" else regression("momentum")


def few_bits_rule(name: str, runs: Sequence[Run]) -> Rule:
    if name in FROM_CATALOGUE:
        return FROM_CATALOGUE[name].rule(runs)
    if name == "sparse_loco":
        return SparseLoCo(2, 0.95, there_and_back(TopKTwoBit(16, 4)))
    if name == "qadam":
        return QAdam(FeedbackByStream(INNER["sign"]), 2, lr=0.01, hierarchical=True)
    return rule_of(name, runs)


def train_with_few_bits(transport: Transport) -> list[Run]:
    runs = [train(transport, each, on_the_gpu(few_bits_task(name)), STEPS) for name, each in FEW_BITS.items()]
    return [replace(run, flats=[flat.cpu() for flat in run.flats]) for run in runs]


def test_few_bits_are_as_simulated(nccl: OneGPU) -> None:
    by_rank = nccl.run(train_with_few_bits)
    for name, runs in zip(FEW_BITS, zip(*by_rank, strict=True), strict=True):
        assert_close(by_step(runs), simulate(few_bits_rule(name, runs), few_bits_task(name), nccl.num_ranks, STEPS))
        if name not in ("sparse_loco", "streaming_uint4", "average_moments"):  # their last step is a local one
            assert all(torch.equal(run.flats[-1], runs[0].flats[-1]) for run in runs), name


JOINED: dict[str, Algorithm] = {
    "plain": GradientAllReduceAlgorithm(),
    "topk": GradientAllReduceAlgorithm(compressor=ErrorFeedback(INNER["topk"]())),
}


def join_all(transport: Transport) -> list[Run]:
    """Ranks that run out of data one after another."""
    task = on_the_gpu(regression("momentum"))
    runs = [test_algorithms_uneven.join(transport, algorithm, task) for algorithm in JOINED.values()]
    return [replace(run, flats=[flat.cpu() for flat in run.flats]) for run in runs]


def test_a_join_is_as_simulated(nccl: OneGPU) -> None:
    by_rank, size = nccl.run(join_all), nccl.num_ranks
    task = test_algorithms_uneven.uneven(regression("momentum"), size)
    for name, runs in zip(JOINED, zip(*by_rank, strict=True), strict=True):
        rule = AllReduce() if name == "plain" else rule_of(name, runs, hierarchical=False)
        assert_close(by_step(runs), simulate(rule, task, size, test_algorithms_uneven.STEPS))
        assert all(torch.equal(run.flats[-1], runs[0].flats[-1]) for run in runs), name


def step_behind_a_kernel(transport: Transport, name: str) -> tuple[float, float]:
    """Seconds until forward, backward and step had returned behind a long kernel, and until the GPU was done."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).cuda()
    ddp = murmura.DDP(model, transport, algorithm=FREE[name]())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(64, 512, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()

    for _ in range(5):  # the first ones plan, compile and allocate
        step()
    torch.cuda.synchronize()
    transport.barrier()
    torch.cuda._sleep(KERNEL_CYCLES)
    began = time.perf_counter()
    step()
    free = time.perf_counter() - began
    torch.cuda.synchronize()
    done = time.perf_counter() - began
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    transport.barrier()
    ddp.close()
    return free, done


@pytest.mark.parametrize("name", FREE)
def test_the_host_is_free(nccl: OneGPU, name: str) -> None:
    for free, done in nccl.run(step_behind_a_kernel, name):
        assert free < HOST_SECONDS < 0.2 < done
