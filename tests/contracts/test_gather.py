"""The contract of reduce, reduce_scatter, all_gather, gather, scatter and all_to_all, on every transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.cases import OPS, REDUCIBLE, digest, is_legal, kinds_of, random
from murmura import CollectiveMismatch, Transport, UsageError
from oracles import reduce as oracle
from worlds import World, those

LONG = 300_007
DTYPES = (torch.float32, torch.bfloat16, torch.int16, torch.complex64)
SHORT = (0, 1, 3, 1001)
LONG_CASES = [(LONG, dtype, op) for dtype in (torch.float32, torch.bfloat16) for op in ("sum", "mean")]
CASES = [*kinds_of(SHORT, REDUCIBLE), *LONG_CASES]
ALL_CASES = [(length, dtype, op) for length in SHORT for dtype in REDUCIBLE for op in OPS if is_legal(op, dtype)]
ALL_CASES += LONG_CASES


def bring(length: int, dtype: torch.dtype, rank: int, op: str) -> Tensor:
    """Ones for a product, which few dtypes hold; else numbers of which every sum is exact."""
    if op == "product":
        return torch.ones(length, dtype=dtype)
    return (torch.arange(length) % 5 + 2 * rank).to(dtype)


def reduce_all(transport: Transport, whole: bool, cases: Sequence[Any] = CASES) -> dict[Any, tuple[str, str, str]]:
    """Digests of the tensor after `reduce`, of the one after an asynchronous one, and of the chunk."""
    results = {}
    size, rank = transport.world_size, transport.rank
    for number, (length, dtype, op) in enumerate(cases):
        values = bring(length, dtype, rank, op) if whole else random(length, dtype, rank)
        one, other = values.clone(), transport.allocate(length, dtype)
        other.copy_(values)
        dst = number % size
        assert transport.reduce(one, dst, op) is one
        assert transport.reduce(other, dst, op, async_op=True).wait() is other
        chunk = transport.reduce_scatter(values, op)
        results[length, dtype, op] = digest(one), digest(other), digest(chunk)
    return results


@pytest.mark.parametrize("size", [1, 5])
def test_sums_of_whole_numbers(world: World, size: int) -> None:
    check_reductions(world, size, CASES, whole=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_sums_of_whole_numbers_of_every_kind(world: World, size: int) -> None:
    check_reductions(world, size, ALL_CASES, whole=True)


@pytest.mark.parametrize("world", those(lambda world: world.exact))
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_made_in_rank_order(world: World, size: int) -> None:
    check_reductions(world, size, CASES, whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("world", those(lambda world: world.exact))
@pytest.mark.parametrize("size", [2, 3])
def test_sums_of_every_kind_are_made_in_rank_order(world: World, size: int) -> None:
    check_reductions(world, size, ALL_CASES, whole=False)


def check_reductions(world: World, size: int, cases: Sequence[Any], whole: bool) -> None:
    by_rank = world.run(reduce_all, size, whole, cases)
    faults = []
    for number, case in enumerate(cases):
        length, dtype, op = case
        inputs = [bring(*case[:2], rank, op) if whole else random(length, dtype, rank) for rank in range(size)]
        if dtype.is_complex and op == "product" and not whole:
            continue
        total = inputs[0] if size == 1 else oracle.fold(inputs, op)
        start = 0
        for rank, results in enumerate(by_rank):
            stop = start + length // size + (rank < length % size)
            reduced = digest(total if rank == number % size else inputs[rank])
            if results[case] != (reduced, reduced, digest(total[start:stop])):
                faults.append(f"{case} on rank {rank}")
            start = stop
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:20])


def gather_all(transport: Transport) -> dict[Any, list[list[str] | None]]:
    """First dimensions differ from rank to rank, and are nothing on rank 1."""
    rank, size = transport.rank, transport.world_size
    results = {}
    for dtype in (*DTYPES, torch.bool):
        for width in (3, 20_000):
            mine = random((0 if rank == 1 else rank + 2) * width, dtype, rank).view(-1, width).clone()
            gathered = transport.all_gather(mine)
            assert all(each.data_ptr() != mine.data_ptr() for each in gathered if each.numel())
            collected = transport.gather(mine.t().contiguous().t(), dst=size - 1)  # not contiguous
            later = transport.all_gather(mine, async_op=True).wait()
            results[dtype, width] = [
                each and [digest(tensor) for tensor in each] for each in (gathered, later, collected)
            ]
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_gather_and_gather(world: World, size: int) -> None:
    for rank, results in enumerate(world.run(gather_all, size)):
        for (dtype, width), (gathered, later, collected) in results.items():
            wanted = [
                digest(random((0 if peer == 1 else peer + 2) * width, dtype, peer).view(-1, width))
                for peer in range(size)
            ]
            assert gathered == wanted
            assert later == wanted
            assert collected == (wanted if rank == size - 1 else None)


def gather_scalars(transport: Transport) -> list[Any]:
    scalar = torch.tensor(float(transport.rank))
    return [transport.all_gather(scalar), transport.gather(scalar)]


def test_scalars(world: World) -> None:
    for rank, (gathered, collected) in enumerate(world.run(gather_scalars, 3)):
        assert [(each.shape, each.item()) for each in gathered] == [((), 0.0), ((), 1.0), ((), 2.0)]
        assert (collected is None) == (rank != 0)


def pieces(size: int, src: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    return [random(width * (rank + 1), dtype, 10 * src + rank) for rank in range(size)]


SHARES = [*((width, dtype) for width in (0, 1, 1001) for dtype in DTYPES), (70_003, torch.float32)]


def scatter_all(transport: Transport) -> list[list[str]]:
    results = []
    size, rank = transport.world_size, transport.rank
    for width, dtype in SHARES:
        for src in {0, size - 1}:
            out = torch.zeros(width * (rank + 1), dtype=dtype)
            given = pieces(size, src, width, dtype) if rank == src else None
            assert transport.scatter(given, src, out=out) is out
            sends, recvs = pieces(size, rank, width, dtype), [torch.zeros_like(out) for _ in range(size)]
            assert transport.all_to_all(sends, recvs) is None
            results.append([digest(each) for each in (out, *recvs)])
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_scatter_and_all_to_all(world: World, size: int) -> None:
    for rank, results in enumerate(world.run(scatter_all, size)):
        wanted = [
            [digest(pieces(size, peer, width, dtype)[rank]) for peer in (src, *range(size))]
            for width, dtype in SHARES
            for src in {0, size - 1}
        ]
        assert results == wanted


def scatter_into_forms(transport: Transport) -> list[Tensor]:
    size, rank = transport.world_size, transport.rank
    frame, leaf = torch.zeros(4, 2 * size), torch.nn.Parameter(torch.zeros(4, size))
    given = [torch.full((4, size), float(peer + 1)) for peer in range(size)] if rank == 0 else None
    transport.scatter(given, out=frame[:, ::2])
    transport.scatter(given, out=leaf, async_op=True).wait()
    columns = torch.arange(float(size)).repeat(4, 1) + 10 * rank
    received = torch.zeros(4, size)
    transport.all_to_all(list(columns.t()), list(received.t()), async_op=True).wait()
    return [frame, leaf.detach(), received]


def test_tensors_of_other_forms(world: World) -> None:
    for rank, (frame, leaf, received) in enumerate(world.run(scatter_into_forms, 3)):
        assert torch.equal(frame[:, ::2], torch.full((4, 3), rank + 1.0))
        assert frame[:, 1::2].count_nonzero() == 0
        assert torch.equal(leaf, torch.full((4, 3), rank + 1.0))
        assert torch.equal(received, (10.0 * torch.arange(3.0) + rank).repeat(4, 1))


def refuse(transport: Transport) -> list[str]:
    """What rank 1 alone gets wrong; all go on."""
    told = []
    three = [torch.ones(2)] * 3
    for call in (
        lambda: transport.reduce(torch.ones(2), dst=3),
        lambda: transport.reduce(torch.ones(2, dtype=torch.int32), 0, "mean"),
        lambda: transport.reduce_scatter(torch.ones(2).bool()),
        lambda: transport.gather(torch.ones(2), dst=-1),
        lambda: transport.all_gather(torch.eye(2).to_sparse()),
        lambda: transport.scatter(None, src=1, out=torch.ones(2)),
        lambda: transport.scatter(three[:2], src=1, out=torch.ones(2)),
        lambda: transport.scatter(three, src=0, out=torch.ones(1).expand(2)),
        lambda: transport.all_to_all(three, three[:2]),
        lambda: transport.all_to_all(three, [torch.ones(3)] * 3),
        lambda: transport.all_to_all([torch.eye(2).to_sparse()] * 3, [torch.eye(2)] * 3),
    ):
        if transport.rank == 1:
            with pytest.raises(UsageError) as caught:
                call()
            told.append(str(caught.value))
        assert transport.all_gather(torch.tensor(transport.rank)) == [0, 1, 2]
    return told


def test_refusals(world: World) -> None:
    told = world.run(refuse, 3)[1]
    assert len(told) == 11


def disagree(transport: Transport, name: str) -> str:
    one, pair = torch.ones(2), [torch.ones(2)] * 2
    calls = {
        "reduce": (lambda: transport.reduce(one, 0), lambda: transport.reduce(one, 1)),
        "reduce_scatter": (lambda: transport.reduce_scatter(one), lambda: transport.reduce_scatter(one, "max")),
        "gather": (lambda: transport.gather(one, 0), lambda: transport.gather(one, 1)),
        "all_gather": (lambda: transport.all_gather(one), lambda: transport.all_gather(one.int())),
        "all_to_all": (lambda: transport.all_to_all(pair, pair), lambda: transport.all_gather(one)),
        "scatter": (lambda: transport.scatter(pair, 0, out=one), lambda: transport.scatter(pair, 1, out=one)),
    }
    with pytest.raises(CollectiveMismatch) as caught:
        calls[name][transport.rank]()
    return str(caught.value)


@pytest.mark.parametrize("world", those(lambda world: world.checks))
@pytest.mark.parametrize("name", ["reduce", "reduce_scatter", "gather", "all_gather", "all_to_all", "scatter"])
def test_ranks_that_disagree_are_told(world: World, name: str) -> None:
    for told in world.run(disagree, 2, name):
        assert f"{name}(" in told
