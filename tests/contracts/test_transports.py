"""The contract of all-reduce, on every transport: the same answer, to the bit, whatever the tensors look like.

Inputs are made on the ranks from their seed; a rank returns digests of its results, which the test compares with the
oracle's. As all transports are compared with one oracle, they agree with each other. Many cases run in one world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.cases import COMPLEX, FLOATS, OPS, REDUCIBLE, Case, digest, grid, is_legal, kinds_of, random
from murmura import ReduceOp, Transport, UsageError
from murmura.collectives import ring
from oracles import reduce as oracle
from worlds import OTHER_WAYS, World, those

SIZES = (1, 2, 3, 4, 5, 8)
SHORT = (0, 1, 3, 1001)
LONG = 300_007
LONGEST = 1_000_003
SMALL_BYTES = 256 * 1024  # where the order of summation changes: (ranks - 1) x bytes
STAGING_BYTES = 64 * 2**20  # what shared memory copies at a time


def reduce_cases(transport: Transport, cases: Sequence[Case], ways: Sequence[str]) -> list[dict[str, str]]:
    """Digests of each case's results, by the way they were made."""
    return [{way: digest(reduce_case(transport, case, way)) for way in ways} for case in cases]


def reduce_case(transport: Transport, case: Case, way: str) -> Tensor:
    values = case.input(transport.rank, transport.world_size)
    flat = transport.allocate(case.length, case.dtype) if way == "allocated" else torch.empty_like(values)
    flat.copy_(values)
    if way == "ring":
        ring.all_reduce(transport, flat, case.op)
    else:
        transport.all_reduce(flat, case.op)
    return flat


def check_cases(world: World, size: int, cases: Sequence[Case]) -> None:
    ways = ["ordinary"] + ["allocated"] * world.arena + ["ring"] * (not world.hops)
    by_rank = world.run(reduce_cases, size, cases, ways)
    faults = []
    for case, *results in zip(cases, *by_rank, strict=True):
        for way in ways:
            found = [result[way] for result in results]
            if len(set(found)) > 1:
                faults.append(f"{case}, {way}: ranks disagree, {found}")
            elif not case.has_oracle or not (world.exact or case.exact or way == "ring"):
                continue
            elif found[0] != case.expected(size, ring=world.hops or way == "ring"):
                faults.append(f"{case}, {way}: not the oracle's bits")
    assert not faults, f"{len(faults)} faults in {len(cases)} cases:\n" + "\n".join(faults[:20])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_short_buffers(world: World, size: int) -> None:
    kinds = kinds_of(SHORT, REDUCIBLE)
    check_cases(world, size, [Case(*kind, exact=number % 2 == 0) for number, kind in enumerate(kinds)])


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_short_buffers_of_every_kind(world: World, size: int) -> None:
    check_cases(world, size, grid(SHORT, REDUCIBLE))


@pytest.mark.parametrize("size", [pytest.param(each, marks=[pytest.mark.slow] * (each in (1, 4))) for each in SIZES])
def test_where_the_order_of_summation_changes(world: World, size: int) -> None:
    cases: list[Case] = []
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        limit = SMALL_BYTES // max(1, size - 1) // dtype.itemsize
        ops = [op for op in ("sum", "mean", "product") if is_legal(op, dtype)]
        cases += [Case(length, dtype, op, exact=False) for length in (limit, limit + 1) for op in ops]
    check_cases(world, size, cases)


@pytest.mark.parametrize("size", [pytest.param(each, marks=[pytest.mark.slow] * (each % 4 < 2)) for each in SIZES])
def test_long_buffers(world: World, size: int) -> None:
    cases = [Case(LONG, torch.float32, op, exact=False) for op in OPS if is_legal(op, torch.float32)]
    cases += [Case(LONG, torch.bfloat16, op, exact=False) for op in ("sum", "mean", "max")]
    cases += [Case(LONG, torch.int64, op, exact=False) for op in ("sum", "min")]
    cases += [Case(LONG, torch.float32, op, exact=True) for op in ("mean", "product")]
    check_cases(world, size, cases)


other_ways = pytest.mark.parametrize("world", [pytest.param(each, id=each.name) for each in OTHER_WAYS])
slow_other_ways = [pytest.param(each, id=each.name, marks=pytest.mark.slow) for each in OTHER_WAYS]


@other_ways
@pytest.mark.parametrize("size", [2, 3])
def test_other_ways_to_reduce_long_buffers_give_the_same_bits(world: World, size: int) -> None:
    kinds = [(torch.float32, "sum"), (torch.float32, "mean"), (torch.bfloat16, "mean"), (torch.int64, "max")]
    check_cases(world, size, [Case(LONG, dtype, op, exact=False) for dtype, op in kinds])


@other_ways
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 5])
def test_other_ways_to_reduce_long_buffers_of_every_dtype(world: World, size: int) -> None:
    check_cases(world, size, grid([LONG], REDUCIBLE, exact=[False]))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", SIZES)
def test_long_buffers_of_every_dtype(world: World, size: int) -> None:
    check_cases(world, size, grid([4097, 262_147, LONGEST], REDUCIBLE))


# Known answers


def average_ranks(transport: Transport, length: int) -> list[Tensor]:
    dtypes = (*FLOATS, *COMPLEX)
    return [
        transport.all_reduce(torch.full((length,), transport.rank + 1, dtype=dtype), ReduceOp.MEAN) for dtype in dtypes
    ]


@pytest.mark.parametrize("length", [1, 400_001])
def test_one_two_three_average_to_two(world: World, length: int) -> None:
    for results in world.run(average_ranks, 3, length):
        for mean in results:
            assert torch.equal(mean, torch.full_like(mean, 2.0))


def divide_sum(transport: Transport, total: float, length: int) -> Tensor:
    return transport.all_reduce(torch.full((length,), total if transport.rank == 0 else 0.0), "mean")


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("length", [1, 400_001])
def test_a_mean_is_divided_not_multiplied(world: World, size: int, length: int) -> None:
    totals = torch.arange(100.0)
    tell_apart = totals / size != totals * (1 / torch.tensor(float(size)))
    total = totals[tell_apart][0]
    for mean in world.run(divide_sum, size, total.item(), length):
        assert torch.equal(mean, (total / size).expand(length))


# Numbers that are not numbers, and two zeros

SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0)


def reduce_special(transport: Transport, length: int) -> dict[tuple[torch.dtype, str], Tensor]:
    """Every pair of special values meets: rank 0 brings each of them six times, the others all six, over and over."""
    results = {}
    for dtype in FLOATS:
        for op in filter(lambda op: is_legal(op, dtype), OPS):
            values = torch.tensor(SPECIAL, dtype=dtype)
            pattern = values.repeat_interleave(6) if transport.rank == 0 else values.repeat(6)
            flat = pattern.repeat(-(-length // 36))[:length].clone()
            if transport.rank == 1:  # another NaN than the other ranks'
                flat[flat.isnan()] = -flat[flat.isnan()]
            transport.all_reduce(flat, op)
            results[dtype, op] = flat
    return results


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("length", [36, 132_012])
def test_special_values_are_the_same_on_every_rank_and_nan_is_passed_on_by_every_op(
    world: World, size: int, length: int
) -> None:
    by_rank = world.run(reduce_special, size, length)
    for key, first in by_rank[0].items():
        assert {digest(results[key]) for results in by_rank} == {digest(first)}, key
    brings_nan = torch.tensor([first != first or second != second for first in SPECIAL for second in SPECIAL])
    brings_nan = brings_nan.repeat(-(-length // 36))[:length]
    for (_, op), result in by_rank[0].items():
        if op in ("min", "max"):
            if not world.exact:
                continue  # the library of others decides
            assert torch.equal(result.isnan(), brings_nan), op
        assert result[brings_nan].isnan().all(), op


# Tensors of every form

SHAPE = (7, 5), (271, 256)  # one of each order of summation


def ordinary(transport: Transport, values: Tensor) -> Tensor:
    return values.clone()


def allocated(transport: Transport, values: Tensor) -> Tensor:
    return transport.allocate(values.numel(), values.dtype).view(values.shape).copy_(values)


def slice_of_allocated(transport: Transport, values: Tensor) -> Tensor:
    """Where it starts is odd, and different on every rank."""
    start = 1 + 2 * transport.rank
    flat = transport.allocate(values.numel() + start + 3, values.dtype).fill_(99)
    return flat[start : start + values.numel()].view(values.shape).copy_(values)


def transposed(transport: Transport, values: Tensor) -> Tensor:
    return values.t().contiguous().t()


def transposed_in_allocated(transport: Transport, values: Tensor) -> Tensor:
    return allocated(transport, values.t().contiguous()).t()


def strided(transport: Transport, values: Tensor) -> Tensor:
    return torch.full((values.shape[0], 2 * values.shape[1]), 99.0)[:, ::2].copy_(values)


def parameter(transport: Transport, values: Tensor) -> Tensor:
    return torch.nn.Parameter(values.clone())


def with_graph(transport: Transport, values: Tensor) -> Tensor:
    leaf = values.clone().requires_grad_()
    return leaf * 1.0


def negated(transport: Transport, values: Tensor) -> Tensor:
    """A view that stands for the negative of what lies in memory."""
    return torch._neg_view(-values)


FORMS: tuple[Callable[[Transport, Tensor], Tensor], ...] = (
    ordinary, allocated, slice_of_allocated, transposed, transposed_in_allocated, strided, parameter, with_graph,
    negated,
)  # fmt: skip


def shaped(rank: int, shape: tuple[int, ...]) -> Tensor:
    """Whole numbers, so that their sum is exact in any order."""
    return random(shape[0] * shape[1], torch.int8, rank).float().view(shape)


def reduce_forms(transport: Transport, shape: tuple[int, ...], forms: Sequence[int], op: str) -> list[str]:
    """Try the form that `forms` gives this rank in place, into another tensor and asynchronously; name what fails."""
    size = transport.world_size
    form = FORMS[forms[transport.rank % len(forms)]]
    values = shaped(transport.rank, shape)
    wanted = oracle.all_reduce([shaped(rank, shape).view(-1) for rank in range(size)], op).view(shape)
    faults = []

    def check(way: str, **claims: bool) -> None:
        faults.extend(f"{form.__name__} {way}: not {claim}" for claim, holds in claims.items() if not holds)

    tensor = form(transport, values)
    result = transport.all_reduce(tensor, op)
    check("in place", right=torch.equal(tensor.detach(), wanted), returned=result is tensor)

    for make in (ordinary, allocated, strided):
        tensor, out = form(transport, values), make(transport, torch.zeros(shape))
        result = transport.all_reduce(tensor, op, out=out)
        untouched = torch.equal(tensor.detach(), values)
        check(f"into {make.__name__}", right=torch.equal(out, wanted), returned=result is out, untouched=untouched)

    tensor, out = ordinary(transport, values), form(transport, torch.zeros(shape))
    result = transport.all_reduce(tensor, op, out=out)
    check("as out", right=torch.equal(out.detach(), wanted), returned=result is out)

    tensor = form(transport, values)
    ticket = transport.all_reduce(tensor, op, async_op=True)
    result = ticket.wait()
    done = ticket.done() and ticket.wait() is tensor
    check("asynchronously", right=torch.equal(tensor.detach(), wanted), returned=result is tensor, done=done)

    tensor, out = form(transport, values), allocated(transport, torch.zeros(shape))
    result = transport.all_reduce(tensor, op, out=out, async_op=True).wait()
    untouched = torch.equal(tensor.detach(), values)
    check("asynchronously into out", right=torch.equal(out, wanted), returned=result is out, untouched=untouched)
    return faults


def reduce_all_forms(transport: Transport, shape: tuple[int, ...], op: str) -> list[str]:
    """Every form on all ranks at once; then every rank another form, each form with each."""
    faults = []
    for number in range(len(FORMS)):
        faults += reduce_forms(transport, shape, [number], op)
    for number in range(len(FORMS)):
        mixed = [number, (2 * number + 1) % len(FORMS), (3 * number + 2) % len(FORMS)]
        faults += [f"mixed {mixed}: {fault}" for fault in reduce_forms(transport, shape, mixed, op)]
    return faults


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPE, ids=["small", "large"])
def test_tensors_of_every_form(world: World, size: int, shape: tuple[int, ...]) -> None:
    assert world.run(reduce_all_forms, size, shape, "sum") == [[]] * size


def reduce_complex_views(transport: Transport) -> list[Tensor]:
    values = torch.full((5,), complex(transport.rank, 1.0), dtype=torch.complex64)
    conjugate = values.clone().conj()
    transport.all_reduce(conjugate)
    real, imaginary = values.clone().real, values.clone().imag
    transport.all_reduce(real)
    transport.all_reduce(imaginary)
    return [conjugate.resolve_conj(), real, imaginary]


def test_views_of_complex_numbers(world: World) -> None:
    for conjugate, real, imaginary in world.run(reduce_complex_views, 3):
        assert torch.equal(conjugate, torch.full((5,), 3 - 3j, dtype=torch.complex64))
        assert torch.equal(real, torch.full((5,), 3.0))
        assert torch.equal(imaginary, torch.full((5,), 3.0))


def reduce_in_inference_mode(transport: Transport, length: int) -> list[float]:
    """As an evaluation does that averages what it measured."""
    with torch.inference_mode():
        tensor = torch.full((length,), transport.rank + 1.0)
        transport.all_reduce(tensor)
        seen = [tensor[-1].item()]
        transport.all_reduce(tensor, "mean", async_op=True).wait()
        seen.append(tensor[-1].item())
        column = torch.full((length, 2), transport.rank + 1.0)[:, 0]
        transport.all_reduce(column, async_op=True).wait()
        seen.append(column[-1].item())
        transport.broadcast(tensor.fill_(transport.rank), src=1)
        seen.append(tensor[-1].item())
        transport.broadcast(column.fill_(transport.rank), src=2, async_op=True).wait()
        seen.append(column[-1].item())
    return seen


@pytest.mark.parametrize("length", [9, 400_001])
def test_inference_mode(world: World, length: int) -> None:
    assert world.run(reduce_in_inference_mode, 3, length) == [[6.0, 6.0, 6.0, 1.0, 2.0]] * 3


def write_inference_tensor(transport: Transport, length: int, operation: str) -> tuple[str, float]:
    """torch lets nobody write such a tensor outside inference mode; what the library does is the same everywhere."""
    with torch.inference_mode():
        tensor = torch.full((length,), transport.rank + 1.0)
    try:
        getattr(transport, operation)(tensor, timeout=5.0)
        outcome = "written"
    except UsageError:
        outcome = "refused"
    return outcome, transport.all_reduce(torch.ones(1)).item()


@pytest.mark.parametrize("length", [9, 400_001])
@pytest.mark.parametrize("operation", ["all_reduce", "broadcast"])
def test_an_inference_tensor_is_written_or_refused_everywhere(world: World, length: int, operation: str) -> None:
    assert len(set(world.run(write_inference_tensor, 2, length, operation))) == 1


def keep_the_rest(transport: Transport, length: int) -> list[Tensor]:
    """What lies around a slice, in memory of each kind."""
    around = []
    for flat in (transport.allocate(length + 5), torch.zeros(length + 5)):
        flat.fill_(7.0)
        transport.all_reduce(flat[2 : length + 2].fill_(1.0))
        around.append(flat)
    strided = torch.full((length, 3), 7.0)
    transport.all_reduce(strided[:, 1].fill_(1.0))
    return [*around, strided]


@pytest.mark.parametrize("length", [9, 400_001])
def test_nothing_is_written_beside_a_slice(world: World, length: int) -> None:
    for *flats, strided in world.run(keep_the_rest, 3, length):
        for flat in flats:
            assert flat.eq(7.0).nonzero().flatten().tolist() == [0, 1, length + 2, length + 3, length + 4]
            assert flat[2 : length + 2].eq(3.0).all()
        assert strided[:, ::2].eq(7.0).all()
        assert strided[:, 1].eq(3.0).all()


def reduce_odd_shapes(transport: Transport) -> dict[str, Any]:
    scalar = torch.tensor(transport.rank + 1.0)
    one, other = torch.zeros(0, 3), transport.allocate(0)
    return {
        "scalar": transport.all_reduce(scalar),
        "scalar again": transport.all_reduce(scalar),
        "scalar out": transport.all_reduce(scalar, out=torch.zeros(())),
        "empty": transport.all_reduce(one, "mean"),
        "empty allocated": transport.all_reduce(other),
        "empty slice": transport.all_reduce(transport.allocate(8)[4:4], "max"),
        "deep": transport.all_reduce(torch.ones(2, 1, 3, 1, 2)),
    }


def test_scalars_and_empty_tensors(world: World) -> None:
    for result in world.run(reduce_odd_shapes, 3):
        assert result["scalar"].shape == ()
        assert result["scalar"] == 18.0  # twice, in place
        assert result["scalar out"] == 54.0
        assert result["empty"].shape == (0, 3)
        assert result["empty allocated"].shape == (0,)
        assert result["empty slice"].shape == (0,)
        assert torch.equal(result["deep"], torch.full((2, 1, 3, 1, 2), 3.0))


def name_ops(transport: Transport) -> list[Tensor]:
    ones = torch.full((4,), transport.rank + 1.0)
    results = [transport.all_reduce(ones.clone(), op) for op in OPS if is_legal(op, ones.dtype)]
    results += [transport.all_reduce(ones.clone(), ReduceOp(op)) for op in OPS if is_legal(op, ones.dtype)]
    return [*results, transport.all_reduce(ones.clone())]


def test_ops_are_strings_or_members_and_sum_is_the_default(world: World) -> None:
    for results in world.run(name_ops, 3):
        assert [result[0].item() for result in results] == [6.0, 2.0, 1.0, 3.0, 6.0] * 2 + [6.0]


# More than fits the memory in which ordinary tensors are staged


def reduce_huge(transport: Transport, numel: int, num_allocated: int) -> bool:
    """Numbers by which every place of a block, and every block, is told from the next; whether all sums are right."""
    on_arena = transport.rank < num_allocated
    tensor = transport.allocate(numel) if on_arena else torch.empty(numel)
    places = torch.arange(numel, dtype=torch.int32).remainder_(1_000_003)
    tensor.copy_(places).add_(transport.rank)
    transport.all_reduce(tensor)
    size = transport.world_size
    return tensor.eq(places.mul_(size).add_(size * (size - 1) // 2)).all().item()


@pytest.mark.parametrize("world", [*those(lambda world: world.arena), *slow_other_ways])
@pytest.mark.parametrize(
    ("size", "num_allocated"),
    [(2, 1), (3, 0), (3, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 0), (3, 3)))],
)
def test_more_than_the_staging_area(world: World, size: int, num_allocated: int) -> None:
    assert world.run(reduce_huge, size, STAGING_BYTES // 4 + 300_001, num_allocated) == [True] * size


# The same tensor again, or another at its address


def reduce_again_and_again(transport: Transport, dtype: torch.dtype) -> list[Any]:
    tensor = torch.full((10,), transport.rank + 1, dtype=dtype)
    seen = []
    for _ in range(5):  # 3, 6, 12, … of two ranks that bring 1 and 2
        transport.all_reduce(tensor)
        seen.append(tensor[0].item())
    for op in ("min", "max", "product", "sum", "max", "sum"):
        transport.all_reduce(tensor.fill_(transport.rank + 2), op)
        seen.append((op, tensor.unique().tolist()))
    for shape in ((5, 2), (2, 5), (10,)):
        transport.all_reduce(tensor.fill_(transport.rank).view(shape))
        seen.append(tensor.unique().tolist())
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.bfloat16], ids=str)
def test_a_tensor_is_reduced_again_and_again(world: World, dtype: torch.dtype) -> None:
    ops = [("min", [2]), ("max", [3]), ("product", [6]), ("sum", [5]), ("max", [3]), ("sum", [5])]
    for seen in world.run(reduce_again_and_again, 2, dtype):
        assert seen == [3, 6, 12, 24, 48, *ops, [1], [1], [1]]


def reduce_at_one_address(transport: Transport) -> dict[str, list[Any]]:
    """One piece of memory, seen as tensors of many kinds, each reduced twice so that the second may be prepared."""
    memory = torch.zeros(64, dtype=torch.uint8)
    seen: dict[str, list[Any]] = {}

    def reduce(name: str, view: Tensor, op: str = "sum") -> None:
        seen[name] = []
        for _ in range(2):
            view.copy_(torch.tensor(transport.rank + 1, dtype=view.dtype))
            transport.all_reduce(view, op)
            seen[name].append(sorted({*view.flatten().tolist()}))

    reduce("float32", memory.view(torch.float32))
    reduce("int32", memory.view(torch.int32))
    reduce("int32 product", memory.view(torch.int32), "product")
    reduce("shorter", memory.view(torch.float32)[:4])
    reduce("square", memory.view(torch.float32).view(4, 4))
    reduce("transposed", memory.view(torch.float32).view(4, 4).t())
    reduce("strided", memory.view(torch.float32).view(4, 4)[:, ::2])
    reduce("square again", memory.view(torch.float32).view(4, 4))
    reduce("float64", memory.view(torch.float64))
    reduce("uint8", memory)
    reduce("bool", memory.view(torch.bool), "max")
    reduce("float32 max", memory.view(torch.float32), "max")
    reduce("negated", torch._neg_view(memory.view(torch.float32)), "max")
    reduce("bfloat16", memory.view(torch.bfloat16))
    reduce("complex64", memory.view(torch.complex64))
    return seen


def test_other_views_of_the_same_memory(world: World) -> None:
    answers = {"int32 product": 6, "bool": True, "float32 max": 3, "negated": 3}
    for seen in world.run(reduce_at_one_address, 3):
        assert seen == {name: [[answers.get(name, 6)]] * 2 for name in seen}


def reduce_reborn(transport: Transport, rounds: int) -> tuple[int, list[str]]:
    """Tensors come and go, of a size the allocator gives the same memory for; only rank 0 keeps some of them alive."""
    addresses: dict[int, set[Any]] = {}
    kept, faults = [], []
    for turn in range(rounds):
        dtype = (torch.float32, torch.int32, torch.float64)[turn % 3]
        length = 4096 // dtype.itemsize
        shape = ((length,), (2, length // 2), (length // 4, 4))[turn // 3 % 3]
        tensor = torch.full(shape, turn % 10 + transport.rank, dtype=dtype)
        if turn % 5 == 4:
            tensor = tensor.t() if tensor.dim() == 2 else tensor[::1]
        addresses.setdefault(tensor.data_ptr(), set()).add((dtype, tensor.shape, tensor.stride()))
        op = ("sum", "max")[turn // 2 % 2]
        transport.all_reduce(tensor, op)
        size, first = transport.world_size, turn % 10
        wanted = first + size - 1 if op == "max" else size * first + size * (size - 1) // 2
        if tensor.unique().tolist() != [wanted]:
            faults.append(f"turn {turn}: {tensor.unique().tolist()}, not {wanted}")
        if transport.rank == 0 and turn % 7 == 0:
            kept.append(tensor)
    return max(len(kinds) for kinds in addresses.values()), faults


def test_another_tensor_at_the_address_of_a_freed_one(world: World) -> None:
    results = world.run(reduce_reborn, 3, 300)
    assert [faults for _, faults in results] == [[], [], []]
    assert max(kinds for kinds, _ in results) > 3  # the case did occur


def churn_allocated(transport: Transport, rounds: int) -> list[str]:
    """Buffers are allocated, used and freed in another order on every rank; none may be given out twice."""
    generator = torch.Generator().manual_seed(transport.rank)
    faults, alive = [], []
    for turn in range(rounds):
        length = (3, 1000, 70_000, 300_000)[turn % 4]
        tensor = transport.allocate(length)
        if tensor.count_nonzero():
            faults.append(f"turn {turn}: not zeroed")
        transport.all_reduce(tensor.fill_(1.0))
        alive.append(tensor)
        spoilt = [buffer.numel() for buffer in alive[:-1] if not buffer.eq(buffer.numel()).all()]
        if spoilt:  # each was left full of its own length
            faults.append(f"turn {turn}: buffers of {spoilt} elements were overwritten")
        if not tensor.eq(transport.world_size).all():
            faults.append(f"turn {turn}: wrong sum")
        tensor.fill_(float(length))
        if len(alive) > 4:
            del alive[int(torch.randint(0, 4, (), generator=generator))]
    return faults


def test_allocated_buffers_come_and_go(world: World) -> None:
    assert world.run(churn_allocated, 3, 60) == [[], [], []]
