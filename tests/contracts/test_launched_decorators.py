"""Decorators around a transport whose operations are launched, without a GPU; see `test_launching`.

They are launched by the caller, in the order of the transport inside, and a failure found since then is theirs too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from contracts.test_launching import FakeEvent, FakeStream, pretend
from murmura import (
    DDP,
    FaultyTransport,
    InProcessTransport,
    MurmuraError,
    PeerTimeout,
    ThrottledTransport,
    TracedTransport,
    Transport,
    TransportError,
    run_world,
)
from murmura.transports.cuda_launches import LaunchOrder
from worlds import SECONDS, hardly_throttled, never_faulty

Wrap = Callable[[Transport], Any]


def traced_and_throttled(transport: Transport) -> Transport:
    return TracedTransport(hardly_throttled(transport))


WRAPS = [TracedTransport, never_faulty, hardly_throttled, traced_and_throttled]
on_each = pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: wrap.__name__)


def collectives(transport: Transport, wrap: Wrap) -> list[str]:
    """Operations of floats, which are launched, and of whole numbers, which are staged, in turn on two channels."""
    pretend(transport)
    wrapped = wrap(transport)
    rank, size = transport.rank, transport.world_size
    other = wrapped.channel("other")
    tickets: list[Any] = []
    expected = []
    for number in range(10):
        total = float(size * number + size * (size - 1) / 2)
        tickets.append(wrapped.all_reduce(torch.full((5,), float(rank + number)), async_op=True))
        tickets.append(other.all_reduce(torch.full((5,), rank + number), async_op=True))
        assert float(other.all_reduce(torch.full((5,), float(rank + number)))[0]) == total
        assert int(wrapped.all_reduce(torch.full((5,), rank + number))[0]) == total
        expected += [total, total]
    assert [float(ticket.wait()[0]) for ticket in tickets] == expected
    assert [each.tolist() for each in wrapped.all_gather(torch.full((rank + 1,), float(rank)))] == [
        [float(peer)] * (peer + 1) for peer in range(size)
    ]
    received = torch.empty(3)
    other.exchange([(torch.full((3,), float(rank)), (rank + 1) % size)], [(received, (rank - 1) % size)])
    assert received.tolist() == [float((rank - 1) % size)] * 3
    wrapped.barrier()
    other.close()
    return [each.name for each in getattr(wrapped, "operations", [])]


@on_each
def test_operations_go_through(wrap: Wrap) -> None:
    names = ["all_reduce"] * 40 + ["all_gather", "exchange", "barrier"]
    for found in run_world(collectives, 3, wrap, kind="processes", transport="gloo", timeout=SECONDS):
        assert found == (names if "trace" in wrap.__name__.lower() else [])


def orders(transport: Transport, wrap: Wrap) -> list[tuple[str, str]]:
    """What each launch was for, and the thread that it was in: two models in turn, then single operations."""
    pretend(transport)
    enter, seen = LaunchOrder.enter, []

    def spy(self: LaunchOrder, stream: Any) -> None:
        seen.append((self.job.partition(" ")[0], threading.current_thread().name))
        enter(self, stream)

    wrapped = wrap(transport)
    models = [DDP(nn.Linear(4, 2), wrapped) for _ in range(2)]
    LaunchOrder.enter = spy  # type: ignore[method-assign]
    sum(ddp(torch.randn(2, 4)).sum() for ddp in models).backward()
    seen.append(("then", ""))
    wrapped.all_reduce(torch.ones(3), async_op=True).wait()
    wrapped.all_reduce(torch.ones(3))
    for ddp in models:
        ddp.verify_in_sync()
        ddp.close()
    return seen


@on_each
def test_the_caller_launches_in_the_order_of_all_channels(wrap: Wrap) -> None:
    """A job that another thread launches is in no order with other channels, and the device may never end them."""
    for seen in run_world(orders, 2, wrap, kind="processes", transport="gloo", timeout=SECONDS):
        assert {thread for _, thread in seen} == {"MainThread", ""}
        jobs = [job for job, _ in seen[: seen.index(("then", ""))]]
        assert len(jobs) >= 4
        assert set(jobs) == {"bucket", "the"}


def gives_up(transport: Transport, wrap: Wrap) -> dict[str, Any]:
    """What a model makes of a fault that the watchdog has found after backward, on the channel inside."""
    pretend(transport)
    ddp = DDP(nn.Linear(4, 2), wrap(transport))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.randn(2, 4)).sum().backward()
    channel: Any = ddp._replica.transport
    deep = channel.channel("deep")
    inside = channel
    while hasattr(inside, "inner"):
        inside = inside.inner
    inside.give_up(PeerTimeout("rank 1 is late", rank=transport.rank, peer=1))
    tail: Any = ddp._driver.reducer._tail
    tail._copied = FakeEvent()  # what was broken off looks as if it had ended
    found: dict[str, Any] = {
        "is told": channel.failure is inside.failure is not None and channel.first_failed() is channel,
        "its channel is told": deep.failed,
    }
    acts = {
        "step": optimizer.step,
        "save": ddp.algorithm_state_dict,
        "forward": lambda: ddp(torch.randn(2, 4)),
        "tail": tail._contents,
    }
    for name, act in acts.items():
        try:
            act()
            found[name] = "it was not refused"
        except MurmuraError as error:
            found[name] = type(error)
    ddp.close()
    return found


@on_each
def test_a_failure_after_the_launch_refuses_forward_step_and_saving(wrap: Wrap) -> None:
    for found in run_world(gives_up, 2, wrap, kind="processes", transport="gloo", timeout=SECONDS):
        assert found.pop("is told")
        assert found.pop("its channel is told")
        assert set(found.values()) == {PeerTimeout}, found


def test_a_failure_is_told_before_anything_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is broken off on a GPU looks as if it had ended: who reads its result asks whether the transport failed."""
    inner = InProcessTransport.create_group(1)[0]
    throttled = ThrottledTransport(inner)
    traced = TracedTransport(throttled)
    told: list[bool] = []
    monkeypatch.setattr(inner, "on_abort", lambda error: told.append(traced.failed and throttled.failed))
    error = TransportError("the exchange was broken off")
    inner.abort(error)
    assert told == [True]
    assert traced.failure is throttled.failure is error
    assert TracedTransport(inner).failure is error
    traced.close()


def test_a_rank_that_hangs_stops_when_the_transport_inside_fails() -> None:
    transports = InProcessTransport.create_group(2, timeout=SECONDS)
    faulty = FaultyTransport(transports[0], "hang", rank=0, operation="barrier")

    def hang() -> None:
        with pytest.raises(TransportError):
            faulty.barrier()

    hanging = threading.Thread(target=hang)
    hanging.start()
    while not faulty.fired:
        time.sleep(0.001)
    transports[0].abort(TransportError("the exchange was broken off"))
    hanging.join(5.0)
    has_stopped = not hanging.is_alive()
    for each in (faulty, *transports):
        each.close()
    assert has_stopped


BUSY_SECONDS = 0.2
LINK_SECONDS = 0.1


class Busy(FakeEvent):
    """The stream has done what was queued before it when `BUSY_SECONDS` have passed."""

    num_made = 0

    def __init__(self) -> None:
        Busy.num_made += 1
        self.made = time.monotonic()

    def query(self) -> bool:
        return time.monotonic() - self.made >= BUSY_SECONDS


def behind_kernels(transport: Transport) -> tuple[float, int, int]:
    """How long an exchange of 12 500 bytes took; for how many events the host waited, of floats, of whole numbers."""
    pretend(transport)
    link, peer = ThrottledTransport(transport, "1mbit"), 1 - transport.rank
    FakeStream.record_event = lambda self: Busy()  # type: ignore[method-assign]
    began = time.monotonic()
    link.exchange([(torch.ones(3125), peer)], [(torch.empty(3125), peer)])
    seconds, num_launched = time.monotonic() - began, Busy.num_made
    numbers = torch.ones(3125, dtype=torch.int32)
    link.exchange([(numbers, peer)], [(torch.empty_like(numbers), peer)])
    assert link.sent_bytes == 25_000
    return seconds, num_launched, Busy.num_made - num_launched


def test_a_slow_link_is_taken_when_the_tensors_are_there_and_until_they_have_been_exchanged() -> None:
    for seconds, *num_waits in run_world(behind_kernels, 2, kind="processes", transport="gloo", timeout=SECONDS):
        assert seconds >= 2 * BUSY_SECONDS + LINK_SECONDS
        assert num_waits == [2, 0]  # what is staged has been waited for


class Stuck(FakeEvent):
    """A kernel that does not end; the watchdog finds why when somebody waits for it."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def query(self) -> bool:
        self._transport.give_up(PeerTimeout("rank 1 is late", rank=0, peer=1))
        return False


def behind_a_stuck_kernel(transport: Transport) -> type[BaseException] | None:
    pretend(transport)
    link, peer = ThrottledTransport(transport, "1gbit"), 1 - transport.rank
    FakeStream.record_event = lambda self: Stuck(transport)  # type: ignore[method-assign]
    try:
        link.exchange([(torch.ones(3), peer)], [(torch.empty(3), peer)])
    except TransportError as error:
        return type(error)
    return None


def test_the_wait_of_a_slow_link_ends_with_the_transport() -> None:
    results = run_world(behind_a_stuck_kernel, 2, kind="processes", transport="gloo", timeout=SECONDS)
    assert results == [PeerTimeout, PeerTimeout]
