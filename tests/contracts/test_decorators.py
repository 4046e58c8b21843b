"""Decorators: what a trace holds, where and when a fault strikes, and how long a slow link takes, by the formula."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from murmura import (
    ConfigError,
    FaultyTransport,
    InProcessTransport,
    PeerLost,
    PeerTimeout,
    ThrottledTransport,
    TracedTransport,
    Transport,
    TransportClosed,
    run_world,
)
from murmura.transports.decorators import faulty
from murmura.transports.decorators.throttled import parse_rate

SECONDS = 20.0

# Traces


def test_a_trace_lists_operations_in_order_with_their_bytes() -> None:
    def act(transport: Transport) -> list[tuple[Any, ...]]:
        with TracedTransport(transport) as traced:
            n, rank = traced.world_size, traced.rank
            x = torch.ones(100)
            traced.all_reduce(x)
            ticket: Any = traced.all_reduce(x, out=torch.empty(100), async_op=True)
            ticket.wait()
            traced.broadcast(torch.ones(10, dtype=torch.float64), 1)
            traced.barrier()
            traced.exchange([(x, (rank + 1) % n)], [(torch.empty(100), (rank - 1) % n)])
            traced.reduce(torch.ones(3), 2)
            traced.reduce_scatter(torch.ones(6))
            traced.all_gather(torch.ones(2))
            traced.gather(torch.ones(2), 1)
            traced.scatter([torch.ones(5)] * n if rank == 0 else None, out=torch.empty(5))
            traced.all_to_all([torch.ones(1)] * n, [torch.empty(1) for _ in range(n)])
        assert not any(each.error for each in traced.operations)
        return [(each.name, each.channel, each.sent_bytes, each.received_bytes) for each in traced.operations]

    for rank, operations in enumerate(run_world(act, 3, timeout=SECONDS)):
        names = [name for name, *_ in operations]
        assert names == [
            "all_reduce", "all_reduce", "broadcast", "barrier", "exchange", "reduce", "reduce_scatter", "all_gather",
            "gather", "scatter", "all_to_all",
        ]  # fmt: skip
        assert {channel for _, channel, *_ in operations} == {"world"}
        sizes = [sizes for _, _, *sizes in operations]
        assert sizes[:5] == [[400, 400], [400, 400], [80, 0] if rank == 1 else [0, 80], [0, 0], [400, 400]]
        assert sizes[5] == ([0, 12] if rank == 2 else [12, 0])
        assert [sent for sent, _ in sizes[6:]] == [24, 8, 8, 60 if rank == 0 else 0, 12]
        assert [received for _, received in sizes[9:]] == [20, 12]


def test_a_trace_knows_when_and_for_how_long() -> None:
    def act(transport: Transport) -> tuple[float, list[Any]]:
        traced = TracedTransport(transport)
        began = time.monotonic()
        if traced.rank == 1:
            time.sleep(0.3)
        traced.barrier()
        traced.barrier()
        return began, traced.operations

    (began, waited), (_, late) = run_world(act, 2, timeout=SECONDS)
    assert 0.25 < waited[0].seconds < 5
    assert began <= waited[0].began < waited[0].began + waited[0].seconds <= waited[1].began
    assert late[0].began >= waited[0].began + 0.2


def test_channels_write_to_the_same_list() -> None:
    def act(transport: Transport) -> list[tuple[str, str]]:
        traced = TracedTransport(transport)
        side = traced.channel("side")
        traced.barrier()
        side.all_reduce(torch.ones(1))
        deeper = side.channel("deeper")
        deeper.barrier()
        assert side.operations is traced.operations is deeper.operations
        part = traced.subgroup([1])
        assert (part is None) == (traced.rank == 0)
        return [(each.name, each.channel) for each in traced.operations]

    operations = [("barrier", "world"), ("all_reduce", "world/side"), ("barrier", "world/side/deeper")]
    assert run_world(act, 2, timeout=SECONDS) == [operations] * 2


def test_a_trace_keeps_errors() -> None:
    first, second = InProcessTransport.create_group(2, timeout=SECONDS)
    with second, TracedTransport(first) as traced:
        with pytest.raises(PeerTimeout):
            traced.recv(torch.empty(3), 1, timeout=0.1)
        with pytest.raises(PeerTimeout, match="failed earlier"):
            traced.barrier()
        (only,) = traced.operations  # what was refused was no operation
        assert (only.name, only.sent_bytes, only.received_bytes) == ("exchange", 0, 12)
        assert only.error.startswith("PeerTimeout: rank 0 waited")
        assert only.seconds >= 0.1


# Faults


def reduce_and_note(transport: Transport, folder: Path, fault: str, operation: str, channel: bool) -> list[Any]:
    """Barriers and all-reduces in turn; notes after each all-reduce what it gave, and whether the fault has struck."""
    faulty_transport = FaultyTransport(transport, fault, rank=1, operation=operation)
    used = faulty_transport.channel("side") if channel else faulty_transport
    seen: list[Any] = []
    try:
        for number in range(1, 6):
            used.barrier()
            began = time.monotonic()
            tensor = used.all_reduce(torch.full((2, 2), float(number)))
            seen.append((tensor.flatten().tolist(), time.monotonic() - began, used.fired))
    finally:
        assert used.fired == faulty_transport.fired
        notes = [f"{len(seen)} {used.fired}"]
        (folder / str(transport.rank)).write_text("\n".join(notes))
    return seen


def fired(folder: Path, world_size: int = 3) -> list[str]:
    """By rank, how many all-reduces had ended when the program did, and whether the fault had struck."""
    return [(folder / str(rank)).read_text() for rank in range(world_size)]


on_either = pytest.mark.parametrize("channel", [False, True])


@on_either
def test_a_rank_raises_in_the_operation_asked_for(channel: bool, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1: rank 1 raised in all_reduce #\d+, as asked\."):
        run_world(reduce_and_note, 3, tmp_path, "raise", "all_reduce #3", channel, timeout=SECONDS)
    assert fired(tmp_path) == ["2 False", "2 True", "2 False"]


@on_either
@pytest.mark.parametrize(("operation", "struck"), [("all_reduce #2", 1), ("all_reduce", 0), ("barrier #4", None)])
def test_a_rank_receives_one_flipped_bit(operation: str, struck: int | None, channel: bool, tmp_path: Path) -> None:
    results = run_world(reduce_and_note, 3, tmp_path, "corrupt", operation, channel, timeout=SECONDS)
    for rank, seen in enumerate(results):
        for number, (values, _, has_fired) in enumerate(seen):
            right = [3.0 * (number + 1)] * 4
            wrong = [-right[0], *right[1:]]
            assert values == (wrong if rank == 1 and number == struck else right)
            assert has_fired == (rank == 1 and number >= (3 if struck is None else struck))


@on_either
def test_a_slow_rank_makes_one_operation_slow(channel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulty, "SLOW_SECONDS", 0.4)
    results = run_world(reduce_and_note, 3, tmp_path, "slow", "all_reduce #4", channel, timeout=SECONDS)
    for seen in results:
        assert [values for values, _, _ in seen] == [[3.0 * number] * 4 for number in range(1, 6)]
        assert [number for number, (_, seconds, _) in enumerate(seen) if seconds > 0.3] == [3]
    assert fired(tmp_path) == ["5 False", "5 True", "5 False"]


def test_slow_is_a_second_late() -> None:
    assert faulty.SLOW_SECONDS == 1.0


@on_either
def test_a_killed_rank_dies_of_it(channel: bool, tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="rank 1 was killed by SIGKILL"):
        run_world(reduce_and_note, 3, tmp_path, "kill", "all_reduce #2", channel, kind="processes", timeout=SECONDS)
    assert not (tmp_path / "1").exists()
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 2)] == ["1 False", "1 False"]


def test_a_rank_that_hangs_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(PeerTimeout, match="for rank 1 in all_reduce #4") as caught:
        run_world(reduce_and_note, 3, tmp_path, "hang", "all_reduce #2", False, kind="processes", timeout=1.0)
    assert caught.value.peer == 1
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 2)] == ["1 False", "1 False"]


@pytest.mark.parametrize("end", ["close", "abort", "close the world of the channel", "abort the world of the channel"])
def test_a_rank_hangs_until_it_is_closed_or_aborted(end: str) -> None:
    transports = InProcessTransport.create_group(2, timeout=SECONDS)
    errors: list[TransportClosed] = []
    ranks = [FaultyTransport(each, "hang", rank=0, operation="barrier") for each in transports]

    def split(rank: int) -> None:
        used[rank] = ranks[rank].channel("side") if "channel" in end else ranks[rank]

    def hang() -> None:
        with pytest.raises(TransportClosed, match="rank 0 hung in barrier #1, as asked") as caught:
            used[0].barrier()
        errors.append(caught.value)

    used: dict[int, FaultyTransport] = {}
    other = threading.Thread(target=split, args=(1,))
    other.start()
    split(0)
    other.join()
    thread = threading.Thread(target=hang)
    thread.start()
    try:
        thread.join(0.1)
        assert thread.is_alive()
        assert (used[0].fired, used[1].fired) == (True, False)
        if end.startswith("abort"):
            ranks[0].abort(ValueError("enough"))
        else:
            ranks[0].close()
        thread.join(5.0)
        assert not thread.is_alive()
        assert len(errors) == 1
    finally:
        for each in ranks:
            each.close()
        thread.join(5.0)


def test_a_fault_strikes_once_and_on_its_rank_however_deep_the_channel() -> None:
    def act(transport: Transport) -> list[Any]:
        faulty_transport = FaultyTransport(transport, "corrupt", rank=1, operation="all_reduce")
        deep = faulty_transport.channel("side").channel("deeper")
        part = faulty_transport.subgroup([2, 1])  # in which rank 1 is number 1, and rank 2 number 0
        before = faulty_transport.fired
        seen = [deep.all_reduce(torch.ones(1)).item()]
        seen += [each.all_reduce(torch.ones(1)).item() for each in (faulty_transport, part) if each is not None]
        return [before, seen, faulty_transport.fired, deep.fired]

    assert run_world(act, 3, timeout=SECONDS) == [
        [False, [3.0, 3.0], False, False],
        [False, [-3.0, 3.0, 2.0], True, True],
        [False, [3.0, 3.0, 2.0], False, False],
    ]


def test_a_fault_finds_its_rank_in_a_subgroup() -> None:
    def act(transport: Transport) -> list[Any] | None:
        part = FaultyTransport(transport, "corrupt", rank=1, operation="all_reduce").subgroup([2, 1])
        return None if part is None else [part.rank, part.all_reduce(torch.ones(1)).item(), part.fired]

    assert run_world(act, 3, timeout=SECONDS) == [None, [1, -2.0, True], [0, 2.0, False]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.int64, torch.bool])
def test_a_flipped_bit_shows_in_every_dtype_and_layout(dtype: torch.dtype) -> None:
    def act(transport: Transport) -> list[list[bool]]:
        n, rank = transport.world_size, transport.rank
        wrong = []
        for name in ("exchange", "all_gather"):
            broken = FaultyTransport(transport.channel(name), "corrupt", rank=0, operation=name)
            sent = torch.ones(3, 2).to(dtype)
            received = torch.zeros(2, 3).to(dtype).t()  # not contiguous
            if name == "exchange":
                broken.exchange([(sent, 1 - rank)], [(received, 1 - rank)])
            else:
                received = broken.all_gather(sent)[0]
            wrong.append((received != sent).flatten().tolist())
            assert broken.fired == (rank == 0)
            assert torch.equal(sent, torch.ones(3, 2).to(dtype))
        assert n == 2
        return wrong

    flipped, right = run_world(act, 2, timeout=SECONDS)
    assert flipped == [[True, *[False] * 5]] * 2
    assert right == [[False] * 6] * 2


@pytest.mark.parametrize(
    ("fault", "rank", "operation", "word"),
    [
        ("explode", 0, "barrier", "fault"),
        ("", 0, "barrier", "fault"),
        ("raise", 0, "allreduce", "operation"),
        ("raise", 0, "", "operation"),
        ("raise", 0, "all_reduce #0", "operation"),
        ("raise", 0, "all_reduce 3", "operation"),
        ("raise", 0, "all_reduce #-1", "operation"),
        ("raise", 1, "barrier", "rank"),
        ("raise", -1, "barrier", "rank"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: str, rank: int, operation: str, word: str) -> None:
    with InProcessTransport.create_group(1)[0] as transport, pytest.raises(ConfigError, match=word):
        FaultyTransport(transport, fault, rank=rank, operation=operation)


# Slow links

RATE = 12_500_000  # bytes per second of 100mbit
MEGABYTE = 10**6


def assert_takes(seconds: float, formula: float) -> None:
    """Never faster than the link; slower only by what a busy machine adds."""
    assert 0.98 * formula <= seconds <= 1.5 * formula + 0.05, f"{seconds:.4f} s, not {formula:.4f} s"


def time_on_a_link(
    world_size: int, operation: str, numel: int, bandwidth: str, latency: float
) -> tuple[float, list[int]]:
    """Seconds until the last rank has ended, after all have begun; and the bytes that each has sent."""
    transports = InProcessTransport.create_group(world_size, timeout=SECONDS)
    ranks = [ThrottledTransport(each, bandwidth, latency) for each in transports]
    ready = threading.Barrier(world_size)
    times: dict[int, tuple[float, float]] = {}

    def act(link: ThrottledTransport) -> None:
        n, rank = world_size, link.rank
        tensor, out = torch.full((numel,), float(rank)), torch.empty(numel)
        ready.wait(SECONDS)
        began = time.monotonic()
        if operation == "all_reduce":
            link.all_reduce(tensor)
            assert tensor[0] == sum(range(n))
        elif operation == "broadcast":
            link.broadcast(tensor, 1)
            assert tensor[-1] == 1
        elif operation == "one way":
            link.exchange([(tensor, 1)] if rank == 0 else [], [(out, 0)] if rank == 1 else [])
        elif operation == "both ways":
            link.exchange([(tensor, 1 - rank)], [(out, 1 - rank)])
            assert out[0] == 1 - rank
        elif operation == "ten small ones":
            for _ in range(10):
                link.exchange([(tensor, 1 - rank)], [(out, 1 - rank)])
        elif operation == "to all":
            peers = [peer for peer in range(n) if peer != rank]
            link.exchange([(tensor, peer) for peer in peers], [(torch.empty(numel), peer) for peer in peers])
        else:
            link.barrier()
        times[rank] = began, time.monotonic()

    threads = [threading.Thread(target=act, args=(link,)) for link in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for link in ranks:
        link.close()
    assert len(times) == world_size
    seconds = max(ended for _, ended in times.values()) - min(began for began, _ in times.values())
    return seconds, [link.sent_bytes for link in ranks]


@pytest.mark.parametrize("latency", [0.0, 0.05])
@pytest.mark.parametrize("operation", ["one way", "both ways"])
def test_an_exchange_takes_its_time_and_both_directions_the_time_of_one(operation: str, latency: float) -> None:
    size = 3 * MEGABYTE  # so that twice the time would be too long
    seconds, sent = time_on_a_link(2, operation, size // 4, "100mbit", latency)
    assert_takes(seconds, latency + size / RATE)
    assert sent == [size, 0 if operation == "one way" else size]


def test_messages_of_one_exchange_share_the_link() -> None:
    seconds, sent = time_on_a_link(3, "to all", MEGABYTE // 8, "100mbit", 0.02)
    assert_takes(seconds, 0.02 + MEGABYTE / RATE)
    assert sent == [MEGABYTE] * 3


def test_exchanges_follow_each_other_without_a_gap_or_a_gift() -> None:
    seconds, sent = time_on_a_link(2, "ten small ones", 25_000, "100mbit", 0.005)
    assert_takes(seconds, 10 * (0.005 + 100_000 / RATE))
    assert sent == [MEGABYTE] * 2


@pytest.mark.parametrize(
    ("world_size", "latency"), [(2, 0.01), (4, 0.0), (4, 0.01), pytest.param(5, 0.01, marks=pytest.mark.slow)]
)
def test_a_ring_all_reduce_takes_the_time_of_the_formula(world_size: int, latency: float) -> None:
    seconds, sent = time_on_a_link(world_size, "all_reduce", MEGABYTE // 4, "100mbit", latency)
    n = world_size
    assert sent == [2 * (n - 1) * MEGABYTE // n] * n
    assert_takes(seconds, 2 * (n - 1) / n * MEGABYTE / RATE + 2 * (n - 1) * latency)


def test_a_small_all_reduce_is_one_exchange_with_everybody() -> None:
    seconds, sent = time_on_a_link(3, "all_reduce", 1000, "1mbit", 0.01)
    assert sent == [8000] * 3
    assert_takes(seconds, 0.01 + 8000 / 125_000)


@pytest.mark.parametrize(("world_size", "depth"), [(2, 1), (3, 2), (4, 2), pytest.param(5, 3, marks=pytest.mark.slow)])
def test_a_broadcast_takes_the_time_of_its_tree(world_size: int, depth: int) -> None:
    seconds, sent = time_on_a_link(world_size, "broadcast", MEGABYTE // 8, "100mbit", 0.01)
    assert sum(sent) == (world_size - 1) * MEGABYTE // 2
    assert_takes(seconds, depth * (0.01 + MEGABYTE / 2 / RATE))


def test_a_barrier_takes_its_latencies() -> None:
    assert_takes(time_on_a_link(4, "barrier", 1, "1gbit", 0.05)[0], 2 * 0.05)


def test_a_channel_is_as_slow_and_ends_with_its_world() -> None:
    def act(transport: Transport) -> tuple[float, int]:
        with ThrottledTransport(transport, "10mbit", 0.02) as link:
            side = link.channel("side")
            out, peer = torch.empty(25_000), 1 - link.rank
            began = time.monotonic()
            ticket: Any = side.exchange([(torch.ones(25_000), peer)], [(out, peer)], async_op=True)
            ticket.wait()
            seconds = time.monotonic() - began
            assert out[0] == 1
        with pytest.raises(TransportClosed):
            side.barrier()
        return seconds, side.sent_bytes

    for seconds, sent in run_world(act, 2, timeout=SECONDS):
        assert sent == 100_000
        assert seconds >= 0.98 * (0.02 + 100_000 / 1_250_000)


def test_closing_ends_the_wait_for_a_slow_link() -> None:
    transports = InProcessTransport.create_group(2, timeout=SECONDS)
    links = [ThrottledTransport(each, "1kbit") for each in transports]
    tickets: list[Any] = [
        link.exchange([(torch.ones(1000), 1 - link.rank)], [(torch.empty(1000), 1 - link.rank)], async_op=True)
        for link in links
    ]
    began = time.monotonic()
    with pytest.raises(PeerTimeout):
        tickets[0].wait(0.1)
    for link in links:
        link.close()
    assert time.monotonic() - began < 5
    for ticket in tickets:
        with pytest.raises(TransportClosed):
            ticket.wait(0.0)


@pytest.mark.parametrize(
    ("rate", "bytes_per_second"),
    [
        ("100mbit", 12.5e6),
        ("1gbit", 125e6),
        ("2.5gbit", 312.5e6),
        (".5 kbit", 62.5),
        ("800bit", 100.0),
        ("1Gbit", 125e6),
    ],
)
def test_rates(rate: str, bytes_per_second: float) -> None:
    assert parse_rate(rate) == bytes_per_second
    with InProcessTransport.create_group(1)[0] as transport:
        assert ThrottledTransport(transport, rate).bytes_per_second == bytes_per_second


@pytest.mark.parametrize("rate", ["", "fast", "0mbit", "0.0gbit", "-1mbit", "100", "100mb", "1e3mbit", "nanbit", 100])
def test_a_rate_that_is_none_is_refused(rate: Any) -> None:
    with InProcessTransport.create_group(1)[0] as transport, pytest.raises(ConfigError, match="bandwidth"):
        ThrottledTransport(transport, rate)


@pytest.mark.parametrize("latency", [-0.001, float("nan"), float("-inf")])
def test_a_latency_that_is_none_is_refused(latency: float) -> None:
    with InProcessTransport.create_group(1)[0] as transport, pytest.raises(ConfigError, match="latency"):
        ThrottledTransport(transport, latency=latency)


# Together


def test_decorators_compose() -> None:
    def act(transport: Transport) -> tuple[Any, ...]:
        broken = FaultyTransport(ThrottledTransport(transport, "100mbit"), "corrupt", rank=1, operation="all_reduce #2")
        traced = TracedTransport(broken)
        values = [traced.all_reduce(torch.ones(MEGABYTE // 8))[0].item() for _ in range(3)]
        side = traced.channel("side")
        values.append(side.all_reduce(torch.ones(1)).item())
        operations = [(each.name, each.sent_bytes) for each in traced.operations]
        assert traced.operations[-1].channel == broken.channel("x").name.replace("/x", "/side")
        return values, operations, min(each.seconds for each in traced.operations[:3]), broken.fired

    for rank, (values, operations, seconds, has_fired) in enumerate(run_world(act, 2, timeout=SECONDS)):
        assert values == ([2.0, -2.0, 2.0, 2.0] if rank == 1 else [2.0] * 4)
        assert operations == [("all_reduce", MEGABYTE // 2)] * 3 + [("all_reduce", 4)]
        assert seconds >= 0.9 * MEGABYTE / 2 / RATE
        assert has_fired == (rank == 1)


def test_a_trace_around_a_fault_holds_its_error_and_one_inside_does_not() -> None:
    def act(transport: Transport) -> None:
        inside = TracedTransport(transport)
        outside = TracedTransport(FaultyTransport(inside, "raise", rank=0, operation="barrier #2"))
        try:
            for _ in range(3):
                outside.barrier()
        finally:
            traces[transport.rank] = [[each.error for each in traced.operations] for traced in (inside, outside)]

    traces: dict[int, list[list[str]]] = {}
    with pytest.raises(RuntimeError, match="as asked"):
        run_world(act, 2, timeout=SECONDS)
    assert traces[0] == [[""], ["", "RuntimeError: rank 0 raised in barrier #2, as asked."]]
    assert [error.partition(":")[0] for error in traces[1][1]] == ["", "PeerLost"]
    assert traces[1][0] == traces[1][1]


def test_what_a_model_plans_by_is_that_of_the_transport_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = InProcessTransport.create_group(1)[0]
    monkeypatch.setattr(inner, "has_spare_core", lambda: False)
    monkeypatch.setattr(inner, "device", torch.device("cpu"))
    traced = TracedTransport(inner)
    assert not traced.has_spare_core()
    assert traced.device == torch.device("cpu")
    assert ThrottledTransport(inner, "1gbit").has_spare_core()  # whoever waits for a slow link computes meanwhile
    traced.close()
