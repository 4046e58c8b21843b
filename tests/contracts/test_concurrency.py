"""Barriers never let go early, and operations in flight at the same time never mix, on every transport.

Ranks delay themselves at random, as load; nothing is synchronised by a delay.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from murmura import Ticket, Transport
from murmura.collectives import ring
from worlds import World, pairs, those


def delay(dice: random.Random, seconds: float) -> None:
    if dice.random() < 0.1:
        time.sleep(dice.random() * seconds)


def time_barriers(transport: Transport, rounds: int, way: str) -> torch.Tensor:
    """When this rank came to each barrier and when it left, in nanoseconds of the clock that all ranks share."""
    dice = random.Random(transport.rank)
    times = torch.zeros(rounds, 2, dtype=torch.int64)
    one = torch.ones(1)
    for turn in range(rounds):
        delay(dice, 0.002)
        times[turn, 0] = time.monotonic_ns()
        if way == "barrier":
            transport.barrier()
        elif way == "ring":
            ring.barrier(transport)
        else:  # a sum needs everybody's part, so it is a barrier too
            transport.all_reduce(one.fill_(1.0))
            assert one == transport.world_size
        times[turn, 1] = time.monotonic_ns()
    return times


@pytest.mark.parametrize(("size", "way"), [(2, "barrier"), (4, "barrier"), (3, "ring"), (3, "all_reduce")])
@pytest.mark.parametrize("rounds", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_barrier_never_lets_go_early(world: World, size: int, way: str, rounds: int) -> None:
    times = torch.stack(world.run(time_barriers, size, rounds, way))
    came, left = times[:, :, 0], times[:, :, 1]
    early = (came.amax(dim=0) > left.amin(dim=0)).nonzero().flatten().tolist()
    assert not early, f"left before the last rank came, in rounds {early[:10]}"


def flood(transport: Transport, length: int, count: int) -> list[int]:
    """Issue `count` sums on two channels before waiting for any; return the numbers of those that came out wrong.

    The ranks issue to the two channels in different turns, and wait in another order each.
    """
    dice = random.Random(transport.rank)
    channels = [transport.channel(name) for name in ("one", "other")]
    queues = [list(range(0, count, 2)), list(range(1, count, 2))]
    tickets: dict[int, Ticket] = {}
    tensors = {}
    while any(queues):
        which = dice.randrange(2)
        if not queues[which]:
            continue
        number = queues[which].pop(0)
        tensors[number] = torch.full((length,), float((number + 1) * (transport.rank + 1)))
        tickets[number] = channels[which].all_reduce(tensors[number], async_op=True)
    waited = list(tickets)
    dice.shuffle(waited)
    size = transport.world_size
    wrong = []
    for number in waited:
        result = tickets[number].wait()
        wanted = (number + 1) * size * (size + 1) // 2
        if result is not tensors[number] or not result.eq(wanted).all():
            wrong.append(number)
    return wrong


@pairs(world=those(), size=[2, 3], length=[1, 1000, 200_001])
def test_hundreds_in_flight_on_two_channels_never_mix(world: World, size: int, length: int) -> None:
    count = 200 if length < 100_000 else 40
    assert world.run(flood, size, length, count) == [[]] * size


@pytest.mark.slow
def test_hundreds_of_large_ones_in_flight(world: World) -> None:
    assert world.run(flood, 4, 200_001, 200) == [[]] * 4


def interleave(transport: Transport, rounds: int) -> list[float]:
    """One tensor, changed by asynchronous and synchronous calls in turn: any other order gives another number."""
    dice = random.Random(transport.rank)
    tensor = torch.ones(500)
    size = transport.world_size
    tickets = []
    for turn in range(rounds):
        if turn % 3 == 2:
            transport.all_reduce(tensor, "mean")  # runs after all that was asked for before
            # The tensor is this rank's again: what was asked for is done.
            assert all(ticket.done() for ticket in tickets)
            tensor.add_(turn).div_(size)
        else:
            tickets.append(transport.all_reduce(tensor, ("sum", "mean")[turn % 2], async_op=True))
        delay(dice, 0.001)
    for ticket in tickets:
        ticket.wait()
    return tensor.unique().tolist()


def interleaved(size: int, rounds: int) -> float:
    value = torch.ones(1)
    for turn in range(rounds):
        if turn % 3 == 2:
            value.add_(turn).div_(size)
        elif turn % 2 == 0:
            value.mul_(size)
    return value.item()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_synchronous_calls_wait_for_asynchronous_ones(world: World, size: int) -> None:
    rounds = 60
    assert world.run(interleave, size, rounds) == [[interleaved(size, rounds)]] * size


def mix_operations(transport: Transport, rounds: int) -> list[str]:
    """Sums, broadcasts and exchanges in flight on one channel, with barriers between."""
    dice = random.Random(transport.rank)
    size, rank = transport.world_size, transport.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    faults = []
    for turn in range(rounds):
        length = (1, 3000, 80_000)[turn % 3]
        total = torch.full((length,), float(turn + rank))
        shared = torch.full((length,), float(turn * 10 + rank))
        received = torch.zeros(length)
        tickets = [
            transport.all_reduce(total, async_op=True),
            transport.broadcast(shared, turn % size, async_op=True),
            transport.exchange([(torch.full((length,), float(rank)), right)], [(received, left)], async_op=True),
        ]
        delay(dice, 0.001)
        if turn % 4 == 0:
            transport.barrier()
        dice.shuffle(tickets)
        for ticket in tickets:
            ticket.wait()
        wanted = (size * turn + size * (size - 1) // 2, turn * 10 + turn % size, left)
        for name, tensor, value in zip(
            ("sum", "broadcast", "exchange"), (total, shared, received), wanted, strict=True
        ):
            if not tensor.eq(value).all():
                faults.append(f"{name} of turn {turn}: {tensor[0].item()}, not {value}")
    return faults


@pytest.mark.parametrize("size", [2, 3])
def test_operations_of_all_kinds_in_flight(world: World, size: int) -> None:
    assert world.run(mix_operations, size, 30) == [[]] * size


@contextlib.contextmanager
def hogged(slow: bool) -> Iterator[None]:
    """Beside a thread that never lets go of the interpreter of its own accord, every step takes milliseconds."""
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            pass

    thread = threading.Thread(target=spin)
    if slow:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if slow:
            thread.join()


def outpace(transport: Transport, length: int, on_arena: bool) -> list[str]:
    """Rank 1 is slow. The others write their tensors anew as soon as a call returns: what it gets must not change."""
    size, rank = transport.world_size, transport.rank
    tensor = transport.allocate(length) if on_arena else torch.empty(length)
    out = torch.empty(length)
    faults = []

    def check(name: str, result: torch.Tensor, value: float) -> None:
        copy = result.clone()
        tensor.fill_(-1.0)
        out.fill_(-1.0)
        if not copy.eq(value).all():
            faults.append(name)

    with hogged(slow=rank == 1):
        for turn in range(2):  # each takes most of a second: the hog holds the interpreter
            tensor.fill_(float(turn + rank))
            transport.broadcast(tensor, 0)
            check(f"broadcast of turn {turn}", tensor, turn)
            tensor.fill_(float(turn + rank))
            transport.all_reduce(tensor)
            check(f"sum of turn {turn}", tensor, size * turn + size * (size - 1) // 2)
            tensor.fill_(float(turn + rank))
            transport.all_reduce(tensor, "max", out=out)
            check(f"maximum of turn {turn}", out, turn + size - 1)
            tensor.fill_(float(turn + rank))
            transport.exchange([(tensor, (rank + 1) % size)], [(out, (rank - 1) % size)])
            check(f"exchange of turn {turn}", out, turn + (rank - 1) % size)
    return faults


@pairs(world=those(), size=[2, 3], length=[5, 150_001], on_arena=[False, True])
def test_a_slow_rank_gets_what_was_sent(world: World, size: int, length: int, on_arena: bool) -> None:
    assert world.run(outpace, size, length, on_arena) == [[]] * size


def call_from_many_threads(transport: Transport, num_threads: int) -> int:
    """Threads that share one transport: calls are made one at a time, so equal calls may come in any order."""
    results = []

    def work() -> None:
        results.extend(transport.all_reduce(torch.ones(10)).sum().item() for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results.count(10.0 * transport.world_size)


def test_threads_that_share_a_transport(world: World) -> None:
    assert world.run(call_from_many_threads, 2, 3) == [60, 60]
