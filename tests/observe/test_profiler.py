"""torch.profiler shows exchanges as events, on every transport, with the time from the call to the end."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from murmura import DDP, Transport, run_world
from murmura.transports import profiling


def watched_step(transport: Transport) -> Any:
    """Rank 0 is profiled: two profilers in one process are more than torch can bear."""
    ddp = DDP(nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40)), transport, bucket_size_bytes=4096)
    for _ in range(2):  # the second round plans the buckets anew, and its communication threads run
        ddp(torch.ones(2, 40)).sum().backward()
    watch = profile(activities=[ProfilerActivity.CPU]) if transport.rank == 0 else contextlib.nullcontext()
    with watch as profiler:
        ddp(torch.ones(2, 40)).sum().backward()
        num_buckets = len(ddp._driver.reducer.buckets)
        transport.all_gather(torch.ones(transport.rank))
        transport.broadcast(torch.ones(3))
        transport.barrier()
        ticket = transport.all_reduce(torch.ones(5), async_op=True)
        first = transport.all_reduce(torch.ones(5))  # prepared for the next, on shared memory
        transport.all_reduce(first)
        ticket.wait()
    ddp.close()
    if profiler is None:
        return None
    events = [event for event in profiler.events() if event.name.startswith("murmura:")]
    return Counter(event.name for event in events), num_buckets, min(event.cpu_time_total for event in events)


@pytest.mark.parametrize(
    ("kind", "transport"),
    [
        ("threads", None),
        ("processes", None),
        *[pytest.param("processes", other, marks=pytest.mark.slow) for other in ("gloo", "hierarchical")],
    ],
)
def test_exchanges_show_in_torch_s_profiler(kind: Any, transport: str | None) -> None:
    (names, num_buckets, shortest), nothing = run_world(watched_step, 2, kind=kind, transport=transport, timeout=40.0)
    assert nothing is None
    assert num_buckets > 1
    assert names.pop("murmura:all_reduce") >= 3 + num_buckets  # a bucket, and perhaps what tells of unused parameters
    once = Counter({"murmura:all_gather": 1, "murmura:broadcast": 1, "murmura:barrier": 1})
    # What a hierarchical transport does inside a host and between hosts shows within its own events.
    assert names == once or (transport == "hierarchical" and names >= once)
    assert shortest > 0


def test_without_a_profiler_no_event_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "record_function", None)  # to call it would raise
    assert not profiling.is_profiled()
    assert run_world(lambda transport: transport.all_reduce(torch.ones(3)).tolist(), 2) == [[2.0] * 3] * 2
