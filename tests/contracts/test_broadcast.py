"""The contract of broadcast and barrier, on every transport."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contracts.cases import REDUCIBLE, digest, random
from contracts.test_concurrency import hogged
from murmura import Transport
from murmura.collectives import ring
from worlds import World, those

DTYPES = (*REDUCIBLE, torch.float8_e4m3fn, torch.uint16, torch.uint64)
LONG = 300_007
HUGE = 21_000_003  # in fp32, a quarter more than the 64 MiB that shared memory copies at a time


def make(length: int, dtype: torch.dtype, seed: int) -> Tensor:
    if dtype in REDUCIBLE:
        return random(length, dtype, seed).clone()
    return random(length * dtype.itemsize, torch.uint8, seed).view(dtype).clone()


def cases(size: int) -> list[tuple[int, torch.dtype, int]]:
    """Length, dtype and source: every rank is the source of some dtypes, and of one of each length."""
    short = [
        (length, dtype, number % size)
        for length in (0, 1, 3, 1001)
        for number, dtype in enumerate(DTYPES, start=length)
    ]
    long = [(LONG, dtype, 0) for dtype in (torch.bool, torch.complex128)]
    return short + long + [(length, torch.float32, src) for length in (1001, LONG) for src in range(size)]


def broadcast_cases(transport: Transport) -> list[dict[str, str]]:
    """Digests of what arrived here, by the way it went."""
    results = []
    for length, dtype, src in cases(transport.world_size):
        values = make(length, dtype, transport.rank)
        allocated = transport.allocate(length, dtype)
        allocated.copy_(values)
        mixed, flat = values.clone(), values.clone()
        if transport.rank % 2:  # every second rank has memory of the other kind
            mixed = transport.allocate(length, dtype)
            mixed.copy_(values)
        ring.broadcast(transport, flat, src)
        results.append(
            {
                "ordinary": digest(transport.broadcast(values, src)),
                "allocated": digest(transport.broadcast(allocated, src)),
                "mixed": digest(transport.broadcast(mixed, src)),
                "tree": digest(flat),
            }
        )
    return results


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow), 5])
def test_every_dtype_and_every_source(world: World, size: int) -> None:
    ways = ("ordinary", "allocated", "mixed", "tree")
    wanted = [dict.fromkeys(ways, digest(make(*case))) for case in cases(size)]
    for results in world.run(broadcast_cases, size):
        assert results == wanted


def broadcast_forms(transport: Transport, shape: tuple[int, int]) -> dict[str, Tensor]:
    values = torch.full(shape, float(transport.rank))
    slot = torch.full((shape[0], 3 * shape[1]), 9.0)
    leaf = torch.nn.Parameter(values.clone())
    results = {
        "transposed": transport.broadcast(values.t().contiguous().t(), 1),
        "strided": transport.broadcast(slot[:, 1::3].copy_(values), 1),
        "parameter": transport.broadcast(leaf, 1),
        "asynchronous": transport.broadcast(values.clone(), 1, async_op=True).wait(),
        "negated": transport.broadcast(torch._neg_view(-values), 1).resolve_neg(),
        "scalar": transport.broadcast(torch.tensor(float(transport.rank)), 1),
    }
    assert results["parameter"] is leaf
    assert slot[:, 2::3].eq(9.0).all()  # beside what was written
    return {name: tensor.detach().clone() for name, tensor in results.items()}


@pytest.mark.parametrize("shape", [(7, 5), (601, 512)], ids=["small", "large"])
def test_tensors_of_every_form(world: World, shape: tuple[int, int]) -> None:
    for results in world.run(broadcast_forms, 3, shape):
        for name, tensor in results.items():
            assert tensor.shape == (() if name == "scalar" else shape)
            assert tensor.eq(1.0).all(), name


def broadcast_by_default(transport: Transport) -> float:
    return transport.broadcast(torch.tensor(5.0 + transport.rank)).item()


def test_from_rank_0_by_default(world: World) -> None:
    assert world.run(broadcast_by_default, 3) == [5.0, 5.0, 5.0]


def broadcast_bits(transport: Transport, length: int) -> str:
    return digest(transport.broadcast(special_bits(length) if transport.rank == 1 else torch.zeros(length), 1))


def special_bits(length: int) -> Tensor:
    """Quiet and signalling NaNs with payloads, infinities, both zeros, numbers too small to be normal."""
    words = [0x7FC00000, 0x7FC01234, 0x7F800001, -0x3FFFF0, 0x7F800000, -0x800000, 0, -0x80000000, 1, -0x7FFFFFFF]
    return torch.tensor(words, dtype=torch.int32).repeat(-(-length // 10))[:length].clone().view(torch.float32)


@pytest.mark.parametrize("length", [10, LONG])
def test_bits_pass_unchanged(world: World, length: int) -> None:
    assert world.run(broadcast_bits, 3, length) == [digest(special_bits(length))] * 3


def broadcast_huge(transport: Transport, on_arena: bool) -> str:
    """Rank 2 is slow, so that the staging area is written anew while it has much to read."""
    tensor = transport.allocate(HUGE) if on_arena else torch.zeros(HUGE)
    if transport.rank == 1:
        tensor.copy_(torch.arange(HUGE))
    with hogged(slow=transport.rank == 2):
        transport.broadcast(tensor, 1)
    return digest(tensor)


@pytest.mark.parametrize("world", those(lambda world: world.arena))
@pytest.mark.parametrize("on_arena", [False, True], ids=["ordinary", "allocated"])
def test_more_than_the_staging_area(world: World, on_arena: bool) -> None:
    assert world.run(broadcast_huge, 3, on_arena) == [digest(torch.arange(HUGE).float())] * 3


def interleave(transport: Transport) -> list[float]:
    """Collectives of all kinds and sizes in a row: what one leaves in shared places must not reach the next."""
    seen = []
    for turn in range(40):
        length = (1, 1000, 70_000, 150_000)[turn % 4]
        tensor = torch.full((length,), float(turn + transport.rank))
        if turn % 3 == 0:
            transport.broadcast(tensor, turn % transport.world_size)
        elif turn % 3 == 1:
            transport.all_reduce(tensor, "max")
        else:
            transport.barrier()
            transport.all_reduce(tensor)
        low, high = tensor.min().item(), tensor.max().item()
        seen.append(low if low == high else float("nan"))
    return seen


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_of_all_kinds_in_a_row(world: World, size: int) -> None:
    wanted = []
    for turn in range(40):
        total = size * turn + size * (size - 1) // 2
        wanted.append(float([turn + turn % size, turn + size - 1, total][turn % 3]))
    assert world.run(interleave, size) == [wanted] * size


def meet(transport: Transport) -> None:
    transport.barrier()
    ring.barrier(transport)
    transport.barrier(timeout=20.0)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_barrier_returns(world: World, size: int) -> None:
    assert world.run(meet, size) == [None] * size
