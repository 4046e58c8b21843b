"""Ranks that call different things all get a `CollectiveMismatch` with a table of who called what: no wrong sum."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from murmura import CollectiveMismatch, Transport, TransportError
from worlds import World, those

LONG = 400_000

Call = Callable[[Transport], object]


def prepared(transport: Transport, op: str) -> None:
    """A sum and a maximum of one tensor, both often enough to be prepared; then `op`."""
    tensor = torch.ones(5)
    for each in ("sum", "max", "sum", "max", "sum", "max"):
        transport.all_reduce(tensor, each)
    transport.all_reduce(tensor, op)


def in_turn(transport: Transport, *ops: str) -> None:
    for op in ops:
        transport.all_reduce(torch.ones(5), op)


# What rank 1 calls, what the others call, and how each is told
DISAGREEMENTS: dict[str, tuple[Call, Call, str, str]] = {
    "op": (
        lambda t: t.all_reduce(torch.ones(3), "max"), lambda t: t.all_reduce(torch.ones(3)),
        "all_reduce(max) of float32[3]", "all_reduce(sum) of float32[3]",
    ),
    "mean and sum": (
        lambda t: t.all_reduce(torch.ones(3), "mean"), lambda t: t.all_reduce(torch.ones(3)),
        "all_reduce(mean) of float32[3]", "all_reduce(sum) of float32[3]",
    ),
    "op, prepared": (
        lambda t: prepared(t, "max"), lambda t: prepared(t, "sum"),
        "all_reduce(max) of float32[5]", "all_reduce(sum) of float32[5]",
    ),
    "op of a long tensor": (
        lambda t: t.all_reduce(torch.ones(LONG), "max"), lambda t: t.all_reduce(torch.ones(LONG)),
        f"all_reduce(max) of float32[{LONG}]", f"all_reduce(sum) of float32[{LONG}]",
    ),
    "op of an allocated tensor": (
        lambda t: t.all_reduce(t.allocate(LONG), "max"), lambda t: t.all_reduce(t.allocate(LONG)),
        f"all_reduce(max) of float32[{LONG}]", f"all_reduce(sum) of float32[{LONG}]",
    ),
    "dtype of the same size": (
        lambda t: t.all_reduce(torch.ones(3, dtype=torch.int32)), lambda t: t.all_reduce(torch.ones(3)),
        "all_reduce(sum) of int32[3]", "all_reduce(sum) of float32[3]",
    ),
    "length": (
        lambda t: t.all_reduce(torch.ones(4)), lambda t: t.all_reduce(torch.ones(3)),
        "all_reduce(sum) of float32[4]", "all_reduce(sum) of float32[3]",
    ),
    "shape": (
        lambda t: t.all_reduce(torch.ones(2, 3)), lambda t: t.all_reduce(torch.ones(6)),
        "all_reduce(sum) of float32[2, 3]", "all_reduce(sum) of float32[6]",
    ),
    "empty": (
        lambda t: t.all_reduce(torch.ones(0)), lambda t: t.all_reduce(torch.ones(3)),
        "all_reduce(sum) of float32[0]", "all_reduce(sum) of float32[3]",
    ),
    "short and long": (
        lambda t: t.all_reduce(torch.ones(LONG)), lambda t: t.all_reduce(torch.ones(3)),
        f"all_reduce(sum) of float32[{LONG}]", "all_reduce(sum) of float32[3]",
    ),
    "asynchronous": (
        lambda t: t.all_reduce(torch.ones(4), async_op=True).wait(), lambda t: t.all_reduce(torch.ones(3)),
        "all_reduce(sum) of float32[4]", "all_reduce(sum) of float32[3]",
    ),
    "order": (
        lambda t: in_turn(t, "min", "max"), lambda t: in_turn(t, "max", "min"),
        "all_reduce(min) of float32[5]", "all_reduce(max) of float32[5]",
    ),
    "sum and broadcast": (
        lambda t: t.broadcast(torch.ones(3)), lambda t: t.all_reduce(torch.ones(3)),
        "broadcast(src=0) of float32[3]", "all_reduce(sum) of float32[3]",
    ),
    "sum and barrier": (
        lambda t: t.barrier(), lambda t: t.all_reduce(torch.ones(3)),
        "barrier()", "all_reduce(sum) of float32[3]",
    ),
    "broadcast's source": (
        lambda t: t.broadcast(torch.ones(LONG), src=1), lambda t: t.broadcast(torch.ones(LONG), src=0),
        f"broadcast(src=1) of float32[{LONG}]", f"broadcast(src=0) of float32[{LONG}]",
    ),
    "broadcast's dtype": (
        lambda t: t.broadcast(torch.ones(3, dtype=torch.int32)), lambda t: t.broadcast(torch.ones(3)),
        "broadcast(src=0) of int32[3]", "broadcast(src=0) of float32[3]",
    ),
}  # fmt: skip


def disagree(transport: Transport, name: str) -> tuple[dict[int, str], str, float, str]:
    """The table, the message, the seconds it took; and what a later call is told."""
    odd, usual, _, _ = DISAGREEMENTS[name]
    began = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:
        (odd if transport.rank == 1 else usual)(transport)
    seconds = time.monotonic() - began
    with pytest.raises(CollectiveMismatch) as later:
        transport.all_reduce(torch.ones(3))
    return caught.value.calls, str(caught.value), seconds, str(later.value)


@pytest.mark.parametrize("world", those(lambda world: world.checks))
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_every_rank_gets_the_table(world: World, size: int, name: str) -> None:
    _, _, odd, usual = DISAGREEMENTS[name]
    for calls, message, seconds, later in world.run(disagree, size, name):
        assert calls == {rank: odd if rank == 1 else usual for rank in range(size)}
        assert odd in message
        assert usual in message
        assert "same order" in message
        assert "earlier" in later
        assert seconds < 10


def exchange_another(transport: Transport, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    with pytest.raises(CollectiveMismatch) as caught:
        if transport.rank == 0:
            transport.send(torch.ones(6), 1)
        else:
            transport.recv(torch.ones(shape, dtype=dtype), 0)
    return str(caught.value)


@pytest.mark.parametrize("world", those(lambda world: world.checks_messages))
@pytest.mark.parametrize(
    ("shape", "dtype", "told"),
    [
        ((5,), torch.float32, "recv(src=0) of float32[5]"),
        ((2, 3), torch.float32, "recv(src=0) of float32[2, 3]"),
        ((6,), torch.int32, "recv(src=0) of int32[6]"),
        ((0,), torch.float32, "recv(src=0) of float32[0]"),
        ((LONG,), torch.float32, f"recv(src=0) of float32[{LONG}]"),
    ],
    ids=str,
)
def test_a_message_that_does_not_fit(world: World, shape: tuple[int, ...], dtype: torch.dtype, told: str) -> None:
    for message in world.run(exchange_another, 2, shape, dtype):
        assert told in message
        assert "send(dst=1) of float32[6]" in message


def exchange_in_a_collective(transport: Transport, length: int, sends: bool) -> float:
    """Rank 0 is in a sum, rank 1 in an exchange with it: they would wait for each other for ever."""
    began = time.monotonic()
    with pytest.raises(CollectiveMismatch):
        if transport.rank == 0:
            transport.all_reduce(torch.ones(length))
        elif sends:
            transport.send(torch.ones(length), 0)
        else:
            transport.recv(torch.ones(length), 0)
    return time.monotonic() - began


@pytest.mark.parametrize("world", those(lambda world: world.checks and world.transport is None))
@pytest.mark.parametrize("length", [3, LONG])
@pytest.mark.parametrize("sends", [True, False])
def test_a_collective_against_an_exchange(world: World, length: int, sends: bool) -> None:
    assert max(world.run(exchange_in_a_collective, 2, length, sends)) < 10


class Broken(torch.Tensor):
    """A tensor that fails when an operation is under way, as one does whose copy finds no memory."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func in (torch.Tensor.detach, torch.Tensor.data_ptr):
            raise MemoryError("no memory for a copy")
        return super().__torch_function__(func, types, args, kwargs)


def fail_within(transport: Transport, length: int) -> list[float]:
    """The third of three equal sums fails on rank 1, which then goes on as if nothing had happened."""
    sums = [transport.all_reduce(torch.full((length,), 1.0))[0].item() for _ in range(2)]
    if transport.rank == 1:
        with pytest.raises(MemoryError):
            transport.all_reduce(torch.full((length,), 10.0).as_subclass(Broken))
    for _ in range(3):
        try:
            transport.all_reduce(tensor := torch.full((length,), 10.0), timeout=5.0)
        except (TransportError, CollectiveMismatch):
            break
        sums.append(tensor[0].item())
    return sums


@pytest.mark.parametrize("length", [3, LONG])
def test_a_failure_within_an_operation_never_makes_a_wrong_sum(world: World, length: int) -> None:
    """It may be as if the call had not been made, or end the world."""
    for sums in world.run(fail_within, 3, length):
        assert sums[:2] == [3.0, 3.0]
        assert set(sums[2:]) <= {30.0}


def split_otherwise(transport: Transport) -> str:
    with pytest.raises(CollectiveMismatch) as caught:
        transport.split("left" if transport.rank else "right").barrier()
    return str(caught.value)


@pytest.mark.parametrize("world", those(lambda world: world.arena))
def test_a_split_by_another_name(world: World) -> None:
    first, second = world.run(split_otherwise, 2)
    assert "'right'" in first
    assert "'left'" in second
