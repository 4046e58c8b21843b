"""Deadlines that make sense, memory that is given back, and links that several channels share."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from murmura import (
    DDP,
    ConfigError,
    InProcessTransport,
    PeerTimeout,
    ProcessGroupTransport,
    SharedMemoryTransport,
    ThrottledTransport,
    Ticket,
    TracedTransport,
    Transport,
    TransportError,
    UsageError,
    run_world,
)
from murmura.transports.rendezvous import file_store
from murmura.transports.shared_memory.futex import Fence

NONSENSE = [float("nan"), float("inf"), -1, 0, "x", [], True, 1e300]


@pytest.mark.parametrize("timeout", NONSENSE, ids=str)
@pytest.mark.parametrize("wrap", [lambda transport: transport, TracedTransport], ids=["plain", "traced"])
def test_a_deadline_that_is_none_is_refused_by_every_operation_also_in_a_world_of_one(timeout, wrap) -> None:
    calls = {
        "all_reduce": lambda t: t.all_reduce(torch.ones(3), timeout=timeout),
        "async": lambda t: t.all_reduce(torch.ones(3), async_op=True, timeout=timeout),
        "broadcast": lambda t: t.broadcast(torch.ones(3), timeout=timeout),
        "barrier": lambda t: t.barrier(timeout),
        "reduce": lambda t: t.reduce(torch.ones(3), timeout=timeout),
        "reduce_scatter": lambda t: t.reduce_scatter(torch.ones(3), timeout=timeout),
        "all_gather": lambda t: t.all_gather(torch.ones(3), timeout=timeout),
        "gather": lambda t: t.gather(torch.ones(3), timeout=timeout),
        "scatter": lambda t: t.scatter([torch.ones(3)] * t.world_size, out=torch.ones(3), timeout=timeout),
        "all_to_all": lambda t: t.all_to_all(
            [torch.ones(1)] * t.world_size, [torch.ones(1) for _ in range(t.world_size)], timeout=timeout
        ),
        "exchange": lambda t: t.exchange([], [], timeout=timeout),
    }
    for size in (1, 2):
        transport = wrap(InProcessTransport.create_group(size)[0])
        for name, call in calls.items():
            with pytest.raises(UsageError, match="timeout="):
                call(transport)
            assert transport.failure is None, name
        transport.close()


@pytest.mark.parametrize("timeout", NONSENSE, ids=str)
def test_a_deadline_that_is_none_is_refused_by_every_constructor(timeout, tmp_path: Path) -> None:
    store = file_store(str(tmp_path / "store"), 2)
    for make in (
        lambda: InProcessTransport.create_group(1, timeout=timeout),
        lambda: SharedMemoryTransport.join("job", 0, 2, timeout=timeout),
        lambda: ProcessGroupTransport.join(store, 0, 2, timeout=timeout),
        lambda: run_world(print, 2, timeout=timeout),
    ):
        with pytest.raises(ConfigError, match="timeout="):
            make()


@pytest.mark.parametrize("timeout", [float("nan"), -1, "x"], ids=str)
def test_waiting_for_a_ticket_has_a_deadline_that_makes_sense(timeout) -> None:
    ticket = Ticket("all_reduce")
    with pytest.raises(UsageError, match="timeout="):
        ticket.wait(timeout)


# Memory


def ask_for_too_much(transport: Transport) -> tuple[str, int | None]:
    if transport.rank == 1:
        with pytest.raises(TransportError) as caught:
            transport.allocate(2**40)
        return str(caught.value), caught.value.rank
    return "", None


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_memory_that_cannot_be_had_is_refused_with_rank_and_size(kind: str) -> None:
    message, rank = run_world(ask_for_too_much, 2, kind=kind)[1]
    assert rank == 1
    assert message.startswith("rank 1 cannot")
    assert "4194304 MiB" in message or str(2**40) in message


def open_and_drop(transport: Transport, closes: bool) -> tuple[list[int], int]:
    """How far the memory of this rank reaches after channels whose staging areas are large, one after the other."""
    assert isinstance(transport, SharedMemoryTransport)
    reach = []
    for _ in range(4):
        channel = transport.channel("side")
        channel.all_reduce(torch.ones(2**18))
        peer = 1 - transport.rank
        channel.exchange([(torch.ones(2**16), peer)], [(torch.ones(2**16), peer)])
        if closes:
            channel.close()
        del channel
        gc.collect()
        transport.barrier()
        place = transport._segment.take(1)
        transport._segment.give_back(place)
        reach.append(max(start for start in transport._segment._arena._taken))
    return reach, len(transport._splits)


@pytest.mark.parametrize("closes", [True, False])
def test_channels_that_were_closed_or_dropped_give_their_memory_back(closes: bool) -> None:
    for reach, num_splits in run_world(open_and_drop, 2, closes, kind="processes", timeout=20.0):
        assert num_splits == 0
        assert len(set(reach[1:])) == 1, reach


def drop_models(transport: Transport) -> list[tuple[int, int]]:
    """File descriptors and threads after each of several models that were dropped without being closed."""
    held = []
    for _ in range(4):
        DDP(nn.Linear(2, 2), transport)(torch.ones(1, 2)).sum().backward()
        transport.barrier()
        gc.collect()
        transport.barrier()
        held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return held


def test_a_model_that_is_dropped_on_gloo_leaves_neither_connections_nor_threads() -> None:
    for held in run_world(drop_models, 2, kind="processes", transport="gloo", timeout=20.0):
        fds, threads = zip(*held[1:], strict=True)
        assert max(fds) - min(fds) <= 1, held
        assert max(threads) - min(threads) <= 1, held


def mean_of_large_halves(transport: Transport) -> float:
    return float(transport.all_reduce(torch.full((3,), 40000.0, dtype=torch.float16), "mean")[0])


@pytest.mark.parametrize(("transport", "hosts"), [("gloo", None), ("hierarchical", [0, 0, 1])])
def test_the_mean_of_float16_does_not_overflow_where_the_sum_would(transport: str, hosts: list[int] | None) -> None:
    means = run_world(mean_of_large_halves, 3, kind="processes", transport=transport, hosts=hosts, timeout=20.0)
    assert means == [40000.0] * 3


def test_a_fence_of_another_thread_never_holds_up_the_one_that_runs_operations() -> None:
    fence = Fence()
    fence.release()
    fence()  # of another thread, just between
    assert fence.acquire(timeout=5.0)


# Throttled links


def test_channels_of_a_throttled_transport_share_its_link() -> None:
    seconds = 0.3

    def program(inner: Transport) -> float:
        transport = ThrottledTransport(inner, bandwidth="1mbit")
        channels = [transport.channel("one"), transport.channel("two")]
        message = torch.zeros(int(seconds * 10**6 / 8), dtype=torch.uint8)
        peer = 1 - transport.rank
        transport.barrier()
        began = time.monotonic()
        tickets = [
            channel.exchange([(message, peer)], [(message.clone(), peer)], async_op=True) for channel in channels
        ]
        for ticket in tickets:
            ticket.wait()
        return time.monotonic() - began

    assert min(run_world(program, 2)) > 1.9 * seconds


def test_a_throttled_exchange_keeps_its_deadline_and_ends_when_it_is_aborted() -> None:
    message = torch.zeros(10**6, dtype=torch.uint8)  # 8 s

    def late(inner: Transport) -> tuple[float, int | None]:
        transport, peer = ThrottledTransport(inner, bandwidth="1mbit"), 1 - inner.rank
        began = time.monotonic()
        with pytest.raises(PeerTimeout) as caught:
            transport.exchange([(message, peer)], [(message.clone(), peer)], timeout=0.3)
        return time.monotonic() - began, caught.value.peer

    (first, its_peer), (second, other_peer) = run_world(late, 2)
    assert (its_peer, other_peer) == (1, 0)
    assert max(first, second) < 2.0

    def aborted(inner: Transport) -> float:
        transport, peer = ThrottledTransport(inner, bandwidth="1mbit"), 1 - inner.rank
        threading.Timer(0.3, transport.abort, [ValueError("stop")]).start()
        began = time.monotonic()
        with pytest.raises(TransportError):
            transport.exchange([(message, peer)], [(message.clone(), peer)])
        return time.monotonic() - began

    assert max(run_world(aborted, 2)) < 3.0
