"""Every algorithm on NCCL beside its simulation, and a host that waits for none of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import murmura
from contracts import test_algorithms_uneven
from contracts.catalogue import INNER, rule_of
from contracts.training import Run, assert_close, by_step, regression
from gpu.test_algorithms import BY_NAME, check, on_the_gpu, train_one
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
    StreamingDiLoCoAlgorithm,
    Transport,
)
from murmura.algorithms import algorithm_named
from murmura.tools.one_gpu import OneGPU
from oracles.algorithms.gradients import AllReduce
from oracles.algorithms.simulation import simulate
from worlds import halves

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

IN_TWO_LEVELS = [name for name, entry in BY_NAME.items() if getattr(entry.make(), "hierarchical", False)]
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


@pytest.mark.parametrize("name", BY_NAME)
def test_every_algorithm_is_as_simulated(nccl: OneGPU, name: str) -> None:
    check(name, nccl.run(train_one, name))


@pytest.mark.parametrize("name", IN_TWO_LEVELS)
def test_inside_hosts_and_between_them(nccl: OneGPU, name: str) -> None:
    size = nccl.num_ranks
    if size == 2 or (size == 3 and name == "low_precision_decentralized"):
        pytest.skip("it takes two ranks on a host, and this one as many on every host")
    check(name, nccl.run(train_one, name, halves(size)), halves(size))


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
    # By the clock a thread beside training waits for its own stream.
    torch.cuda.set_sync_debug_mode("default" if name == "async_by_the_clock" else "error")
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
