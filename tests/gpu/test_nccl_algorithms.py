"""Every algorithm on NCCL beside its simulation, and a host that waits for none of them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import murmura
from contracts.catalogue import CATALOGUE
from contracts.training import assert_close, by_step, regression
from gpu.test_algorithms import ONE_LEVEL, QUANTISED, STEPS, train_all
from murmura import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    Cast,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    StreamingDiLoCoAlgorithm,
    Transport,
)
from murmura.tools.one_gpu import OneGPU
from oracles.algorithms.simulation import simulate

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
}


def test_every_algorithm_is_as_simulated(nccl: OneGPU) -> None:
    by_rank = nccl.run(train_all)
    for entry, runs in zip(CATALOGUE, zip(*by_rank, strict=True), strict=True):
        wanted = simulate(entry.rule(runs), entry.fit(regression("momentum")), nccl.num_ranks, STEPS)
        assert_close(by_step(runs), wanted, ONE_LEVEL if entry.name in QUANTISED else 1e-9)
        if entry.lockstep:
            assert all(torch.equal(run.flats[-1], runs[0].flats[-1]) for run in runs), entry.name


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
