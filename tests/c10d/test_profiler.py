"""What torch.profiler shows of the backend: the calls, as on every backend, and how long their operations took."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from c10d.groups import run

LATE_SECONDS = 0.3


def watched() -> Any:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)


def operations(profiler: Any) -> list[tuple[str, float]]:
    """The name and the seconds of each operation."""
    events = [event for event in profiler.events() if event.name.startswith("murmura:")]
    return [(event.name, event.cpu_time_total / 1e6) for event in events]


def await_late_peer(way: str, length: int) -> list[tuple[str, float]]:
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(LATE_SECONDS)  # the lateness itself
    with watched() as profiler:
        work: Any = dist.all_reduce(torch.ones(length), async_op=True)
        if way == "future":
            work.get_future().wait()
        else:
            work.wait()
    return operations(profiler)


@pytest.mark.parametrize(("way", "length"), [("future", 3), ("future", 10**6), ("wait", 3), ("wait", 10**6)])
def test_an_operation_lasts_until_its_end_whoever_waits(way: str, length: int) -> None:
    ((name, seconds),) = run(await_late_peer, 2, way, length)[0]
    assert name == "murmura:all_reduce"
    assert seconds > LATE_SECONDS / 2


def step_with_late_peer() -> list[tuple[str, float]]:
    module = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(2):
        module(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(LATE_SECONDS)
    with watched() as profiler:
        module(torch.ones(2, 4)).sum().backward()
    return operations(profiler)


def test_the_exchange_of_stock_ddp_shows() -> None:
    told = run(step_with_late_peer, 2)[0]
    assert [name for name, _ in told] == ["murmura:all_reduce"]
    assert told[0][1] > LATE_SECONDS / 2
