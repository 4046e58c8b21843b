"""Several channels of NCCL at once, with 2, 3 and 4 ranks on one GPU: one order of launches, and a host that waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import murmura
from murmura import AsyncModelAverageAlgorithm, Transport
from murmura.tools.one_gpu import OneGPU
from murmura.transports.cuda_launches import CudaLaunches
from murmura.transports.process_group import ProcessGroupTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]

LONG_CYCLES = 100_000_000  # about 50 ms


def three_at_once(transport: Transport, num_rounds: int) -> list[Any]:
    """Two models, one averaged by the clock in a thread of its own, and the user's own collectives, behind kernels."""
    torch.manual_seed(0)
    by_clock = murmura.DDP(
        nn.Linear(512, 512).cuda(), transport, algorithm=AsyncModelAverageAlgorithm(sync_interval_ms=20)
    )
    in_step = murmura.DDP(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda(), transport)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (by_clock, in_step)]
    own, totals = transport.channel("the user's own"), []
    for number in range(num_rounds):
        x = torch.full((8, 512), float(number + transport.rank), device="cuda")
        torch.cuda._sleep(LONG_CYCLES // 5)
        loss = by_clock(x).square().mean() + in_step(x).square().mean()
        loss.backward()
        torch.cuda._sleep(LONG_CYCLES // 10)
        totals.append(own.all_reduce(torch.full((5,), float(number + transport.rank), device="cuda")))
        transport.all_reduce(loss.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    in_step.verify_in_sync()
    by_clock.close()
    in_step.close()
    own.close()
    return [float(total[0]) for total in totals]


def two_worlds(transport: Transport, num_rounds: int) -> list[float]:
    """Two models with a world each, as two calls of DDP(model) connect, trained in turns behind long kernels."""
    other = transport.channel("another world")
    assert isinstance(other, ProcessGroupTransport)
    assert other.launches is not None
    other.launches = CudaLaunches(other, other.device)  # its own, as that of a world that was connected by itself
    torch.manual_seed(0)
    ddps = [
        murmura.DDP(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda(), each) for each in (transport, other)
    ]
    for number in range(num_rounds):
        x = torch.full((8, 512), float(number + transport.rank), device="cuda")
        torch.cuda._sleep(LONG_CYCLES // 5 * ((transport.rank + number) % 2))
        sum(ddp(x).square().mean() for ddp in ddps).backward()  # type: ignore[union-attr]
        transport.all_reduce(torch.ones(5, device="cuda"))
        other.all_reduce(torch.ones(5, device="cuda"))
    found = [float(next(ddp.parameters()).grad.abs().sum()) for ddp in ddps]  # type: ignore[union-attr]
    for ddp in ddps:
        ddp.verify_in_sync()
        ddp.close()
    other.close()
    return found


def test_two_worlds_in_one_process(nccl: OneGPU) -> None:
    results = nccl.run(two_worlds, 20)
    assert all(found == results[0] for found in results)


def wait_beside_buckets(transport: Transport, num_rounds: int) -> list[float]:
    """The host waits for small operations of other channels while buckets are under way, now here, now there."""
    ddp = murmura.DDP(
        nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).cuda(), transport, bucket_size_bytes=2**20
    )
    optimizer, found = torch.optim.SGD(ddp.parameters(), lr=1e-3), []
    x = torch.full((8, 512), float(transport.rank), device="cuda")
    for number in range(num_rounds):
        optimizer.zero_grad()
        torch.cuda._sleep(LONG_CYCLES // 10 * ((transport.rank + number) % transport.world_size))
        loss = ddp(x).square().mean()
        loss.backward()
        transport.barrier()
        found.append(murmura.average_losses(transport, float(number + transport.rank), 1))
        optimizer.step()
    ddp.verify_in_sync()
    ddp.close()
    return found


def test_the_host_waits_for_other_channels_while_buckets_are_under_way(nccl: OneGPU) -> None:
    size = nccl.num_ranks
    expected = [number + (size - 1) / 2 for number in range(30)]
    assert nccl.run(wait_beside_buckets, 30) == [pytest.approx(expected)] * size


def test_several_communicators_behind_long_kernels(nccl: OneGPU) -> None:
    size = nccl.num_ranks
    expected = [size * number + size * (size - 1) / 2 for number in range(20)]
    assert nccl.run(three_at_once, 20) == [expected] * size
