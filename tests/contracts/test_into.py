"""The contract of all_gather_into and reduce_scatter_into, on every transport."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.cases import digest, random
from murmura import CollectiveMismatch, Transport, UsageError
from oracles import reduce as oracle
from worlds import World, those

LENGTHS = (0, 1, 1001, 100_003)
DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.bool)
CASES = [(length, dtype) for length in LENGTHS for dtype in DTYPES if length < 10**4 or dtype is torch.float32]


def bring(transport: Transport, values: Tensor, allocated: bool) -> Tensor:
    if not allocated:
        return values.clone()
    own = transport.allocate(values.numel(), values.dtype)
    return own.copy_(values)


def gather_all(transport: Transport) -> dict[Any, list[list[str]]]:
    """Digests of what came, as parts: into ordinary memory, allocated memory, a list, in place, and later."""
    rank, size = transport.rank, transport.world_size
    results = {}
    for length, dtype in CASES:
        values = random(length, dtype, rank)
        came = []
        for allocated_in, allocated_out in ((False, False), (True, False), (True, True), (False, rank == 0)):
            out = bring(transport, torch.zeros(size * length, dtype=dtype), allocated_out)
            assert transport.all_gather_into(out, bring(transport, values, allocated_in)) is out
            came.append(out)
        aliased = bring(transport, torch.zeros(size * length, dtype=dtype), True)
        own = aliased[rank * length : (rank + 1) * length].copy_(values)
        assert transport.all_gather_into(aliased, own, async_op=True).wait() is aliased
        astray = torch.zeros(size * length, dtype=dtype)  # the tensor lies where another rank's is to come
        other = (rank + 1) % size
        transport.all_gather_into(astray, astray[other * length : (other + 1) * length].copy_(values))
        columns = torch.zeros(size * length, 2, dtype=dtype)[:, 0]  # not contiguous
        transport.all_gather_into(columns, values)
        parts = [[digest(out[peer * length : (peer + 1) * length]) for peer in range(size)] for out in came]
        parts += [
            [digest(each[peer * length : (peer + 1) * length]) for peer in range(size)] for each in (aliased, astray)
        ]
        rows = torch.empty(size * length, dtype=dtype).copy_(columns)
        parts.append([digest(rows[peer * length : (peer + 1) * length]) for peer in range(size)])
        listed = [torch.zeros(length, dtype=dtype) for _ in range(size)]
        transport.all_gather_into(listed, values)
        results[length, dtype] = [*parts, [digest(each) for each in listed]]
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_gather_into(world: World, size: int) -> None:
    for results in world.run(gather_all, size):
        for (length, dtype), ways in results.items():
            wanted = [digest(random(length, dtype, peer)) for peer in range(size)]
            for number, came in enumerate(ways):
                assert came == wanted, (length, dtype, number)


def reduce_all(transport: Transport, whole: bool) -> dict[Any, list[str]]:
    rank, size = transport.rank, transport.world_size
    results = {}
    for length, dtype in CASES:
        if dtype is torch.bool:
            continue
        op = "sum" if dtype is not torch.float32 else "mean"
        values = brought(size, rank, length, dtype, whole)
        came = []
        for allocated in (False, True, rank == 0):
            out = torch.zeros(length, dtype=dtype)
            assert transport.reduce_scatter_into(out, bring(transport, values, allocated), op) is out
            came.append(out)
        aliased = bring(transport, values, rank % 2 == 0)
        own = aliased[rank * length : (rank + 1) * length]
        transport.reduce_scatter_into(own, aliased, op, async_op=True).wait()
        listed = torch.zeros(length, dtype=dtype)
        pieces = [values[peer * length : (peer + 1) * length].clone() for peer in range(size)]
        transport.reduce_scatter_into(listed, pieces, op)
        results[length, dtype] = [digest(each) for each in (*came, own, listed)]
    return results


def brought(size: int, rank: int, length: int, dtype: torch.dtype, whole: bool) -> Tensor:
    if whole:
        return (torch.arange(size * length) % 5 + 2 * rank).to(dtype)
    return random(size * length, dtype, rank)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_reduce_scatter_into_of_whole_numbers(world: World, size: int) -> None:
    check_reductions(world, size, whole=True)


@pytest.mark.parametrize("world", those(lambda world: world.exact))
@pytest.mark.parametrize("size", [2, 3])
def test_reduce_scatter_into_sums_in_rank_order(world: World, size: int) -> None:
    check_reductions(world, size, whole=False)


def check_reductions(world: World, size: int, whole: bool) -> None:
    for rank, results in enumerate(world.run(reduce_all, size, whole)):
        for (length, dtype), ways in results.items():
            inputs = [brought(size, peer, length, dtype, whole) for peer in range(size)]
            op = "sum" if dtype is not torch.float32 else "mean"
            total = inputs[0] if size == 1 else oracle.fold(inputs, op)
            wanted = digest(total[rank * length : (rank + 1) * length])
            assert ways == [wanted] * len(ways), (length, dtype, rank)


def refuse(transport: Transport) -> None:
    size = transport.world_size
    for call in (
        lambda: transport.all_gather_into(torch.zeros(3 * size + 1), torch.zeros(3)),
        lambda: transport.all_gather_into(torch.zeros(3 * size), torch.zeros(3, dtype=torch.int32)),
        lambda: transport.all_gather_into([torch.zeros(3)] * (size - 1), torch.zeros(3)),
        lambda: transport.all_gather_into(torch.zeros(1).expand(3 * size), torch.zeros(3)),
        lambda: transport.reduce_scatter_into(torch.zeros(3), torch.zeros(3 * size - 1)),
        lambda: transport.reduce_scatter_into(torch.zeros(3), torch.zeros(3 * size), "band"),
    ):
        with pytest.raises(UsageError):
            call()
    transport.barrier()  # nothing was sent


def test_what_does_not_fit_is_refused(world: World) -> None:
    world.run(refuse, 2)


def disagree(transport: Transport) -> str:
    length = 3 + transport.rank
    with pytest.raises(CollectiveMismatch) as caught:
        transport.all_gather_into(torch.zeros(2 * length), torch.zeros(length))
    return str(caught.value)


@pytest.mark.parametrize("world", those(lambda world: world.checks))
def test_ranks_that_disagree_are_told(world: World) -> None:
    for told in world.run(disagree, 2):
        assert "all_gather_into() of float32[3]" in told
        assert "all_gather_into() of float32[4]" in told


def single(value: float) -> torch.Tensor:
    """One element of a column: contiguous, as torch sees it, and yet its stride is not 1."""
    element = torch.zeros(3, 2)[:1, 1].fill_(value)
    assert element.is_contiguous()
    assert element.stride() == (2,)
    return element


def of_any_stride(transport: Transport) -> dict[str, list[float]]:
    rank, peer = transport.rank, 1 - transport.rank
    outs = {name: single(-1.0) for name in ("scattered", "exchanged", "reduced and scattered")}
    gathered, received = [single(-1.0), single(-1.0)], [single(-1.0), single(-1.0)]
    transport.all_gather_into(gathered, single(rank))
    transport.reduce_scatter_into(outs["reduced and scattered"], [single(rank), single(rank)])
    transport.scatter([single(3.0), single(3.0)] if rank == 0 else None, 0, out=outs["scattered"])
    transport.exchange([(single(5.0), peer)], [(outs["exchanged"], peer)])
    transport.all_to_all([single(rank), single(rank)], received)
    return {
        "all-reduced": transport.all_reduce(single(rank)).tolist(),
        "broadcast": transport.broadcast(single(rank), 1).tolist(),
        "gathered": [each.item() for each in transport.all_gather(single(rank))],
        "gathered into": [each.item() for each in gathered],
        "from all": [each.item() for each in received],
        **{name: out.tolist() for name, out in outs.items()},
    }


def test_a_single_element_may_have_any_stride(world: World) -> None:
    wanted = {
        "all-reduced": [1.0], "broadcast": [1.0], "gathered": [0.0, 1.0], "gathered into": [0.0, 1.0],
        "from all": [0.0, 1.0], "scattered": [3.0], "exchanged": [5.0], "reduced and scattered": [1.0],
    }  # fmt: skip
    assert world.run(of_any_stride, 2) == [wanted] * 2
