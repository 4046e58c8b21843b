"""Every collective x reduction x dtype x shape x way of calling x group, on murmura and on Gloo in one world."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)
DTYPES = (*FLOATS, *INTEGERS, torch.complex64, torch.complex128)
SHAPES = ((), (1,), (3, 5), (0,), (1000,), (70_001,), "transposed")
GROUPS = ("world", "pair", "alone")
REDUCING = (
    "all_reduce", "all_reduce_coalesced", "all_reduce_sparse", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_coalesced", "reduce_scatter_list_uneven",
)  # fmt: skip
MOVING = (
    "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_gather_uneven",
    "all_gather_object", "gather_object", "scatter_object_list", "all_to_all", "all_to_all_single", "all_to_all_uneven",
    "all_to_all_list_uneven", "gather", "scatter", "send_recv", "recv_any_source", "batch_isend_irecv", "barrier",
)  # fmt: skip
SECONDS = 20.0  # the deadline of a call
Kind = tuple[str, str, torch.dtype]
"""A collective, an operation and a dtype."""


@dataclass(frozen=True)
class Case:
    collective: str
    op: str
    dtype: torch.dtype
    shape: Any
    is_async: bool
    group: str
    absolute: bool = False  # whether the values are made positive

    @property
    def kind(self) -> Kind:
        return self.collective, self.op, self.dtype


def all_cases() -> Iterator[Case]:
    ways = list(itertools.product(SHAPES, (False, True), GROUPS))
    for collective, op, dtype in itertools.product(REDUCING, OPS, DTYPES):
        bits = op in ("BAND", "BOR", "BXOR")
        if (bits and dtype not in INTEGERS) or (op == "AVG" and dtype in INTEGERS):
            continue
        if (dtype.is_complex and op not in ("SUM", "AVG")) or (collective == "all_reduce_sparse" and op != "SUM"):
            continue
        if collective == "all_reduce_sparse" and dtype is torch.bool:  # Gloo only where there is nothing to sum
            continue
        yield from (Case(collective, op, dtype, *way) for way in ways if fits(collective, way[0]))
    for collective, dtype in itertools.product(MOVING, DTYPES):
        yield from (Case(collective, "", dtype, *way) for way in ways if fits(collective, way[0]))


def fits(collective: str, shape: Any) -> bool:
    """Whether Gloo carries it out, or refuses it without ending the process or its group.

    It cuts tensors along their first dimension, and never ends a receive of nothing from any source.
    """
    if collective == "recv_any_source" and shape == (0,):
        return False
    return shape != () or not collective.endswith(("_tensor", "_single", "_uneven", "_coalesced", "_sparse"))


def sample() -> list[Case]:
    """A case of every kind, so that each shape, way of calling and group comes with many of them."""
    chosen = random.Random(0)
    by_kind: dict[Kind, list[Case]] = {}
    for case in all_cases():
        by_kind.setdefault(case.kind, []).append(case)
    return [chosen.choice(cases) for cases in by_kind.values()]


def values(case: Case, rank: int, scale: int = 1) -> Tensor:
    transposed = case.shape == "transposed" and scale == 1
    shape = (30, 40) if case.shape == "transposed" else case.shape
    shape = (scale * shape[0], *shape[1:]) if shape else (scale,) * (scale > 1)
    shape = shape[::-1] if transposed else shape
    generator = torch.Generator().manual_seed(1000 * rank + scale)
    if case.dtype.is_floating_point or case.dtype.is_complex:
        made = torch.randn(shape, generator=generator, dtype=torch.float64) + 1.5
        made = made.abs() if case.absolute else made
        made = torch.complex(made, made.flip(0) if made.dim() else made) if case.dtype.is_complex else made
        made = made.to(case.dtype)
    else:
        made = torch.randint(0, 2 if case.dtype is torch.bool else 3, shape, generator=generator).to(case.dtype)
    return made.t() if transposed else made


Collective = Callable[[Case, Any, int, int], list[Tensor]]


def call(case: Case, group: Any, rank: int, size: int) -> list[Tensor]:
    """Carry out the case on `group`, of which this process is `rank`; return what it wrote."""
    op = getattr(dist.ReduceOp, case.op) if case.op else None
    options: dict[str, Any] = {"group": group, "async_op": case.is_async}
    own = values(case, rank)
    peer_first = dist.get_global_rank(group, 0)
    out: list[Tensor] = [own.clone()]
    name, work = case.collective, None
    if name == "all_reduce":
        work = dist.all_reduce(out[0], op, **options)
    elif name == "all_reduce_coalesced":
        out = [own.clone(), values(case, rank + 10)]
        with dist._coalescing_manager(group, async_ops=case.is_async) as work:
            for each in out:
                dist.all_reduce(each, op, group=group)
        work = work if case.is_async else None
    elif name == "all_reduce_sparse":
        out = [own.to_sparse()]
        work = dist.all_reduce(out[0], op, **options)
    elif name == "reduce":
        work = dist.reduce(out[0], peer_first, op, **options)
    elif name == "reduce_scatter":
        work = dist.reduce_scatter(out[0], [values(case, rank + 10 * each) for each in range(size)], op, **options)
    elif name == "reduce_scatter_tensor":
        out = [torch.zeros_like(own).contiguous()]
        work = dist.reduce_scatter_tensor(out[0], values(case, rank, size).contiguous(), op, **options)
    elif name == "reduce_scatter_coalesced":
        out = [torch.zeros_like(own).contiguous() for _ in range(2)]
        with dist._coalescing_manager(group, async_ops=case.is_async) as work:
            for index, each in enumerate(out):
                dist.reduce_scatter_tensor(each, values(case, rank + 10 * index, size).contiguous(), op, group=group)
        work = work if case.is_async else None
    elif name == "reduce_scatter_list_uneven":
        parts = [values(case, rank + 10 * each, each + 1) for each in range(size)]
        out = [torch.zeros_like(parts[rank])]
        if is_on_gloo(group):  # which refuses it
            for part in parts:
                dist.all_reduce(part, op, group=group)
            out = [parts[rank]]
        else:
            work = dist.reduce_scatter(out[0], parts, op, **options)
    elif name == "broadcast":
        work = dist.broadcast(out[0], peer_first, **options)
    elif name == "all_gather":
        out = [torch.zeros_like(own) for _ in range(size)]
        work = dist.all_gather(out, own, **options)
    elif name == "all_gather_into_tensor":
        out = [torch.zeros_like(values(case, rank, size)).contiguous()]
        work = dist.all_gather_into_tensor(out[0], own.contiguous(), **options)
    elif name == "all_gather_coalesced":
        out = [torch.zeros_like(values(case, rank, size)).contiguous() for _ in range(2)]
        with dist._coalescing_manager(group, async_ops=case.is_async) as work:
            for index, each in enumerate(out):
                dist.all_gather_into_tensor(each, values(case, rank + 10 * index).contiguous(), group=group)
        work = work if case.is_async else None
    elif name == "all_gather_uneven":
        out = [torch.zeros_like(values(case, each, each + 1)) for each in range(size)]
        if is_on_gloo(group):  # which refuses it
            out[rank].copy_(values(case, rank, rank + 1))
            for each, tensor in enumerate(out):
                dist.broadcast(tensor, dist.get_global_rank(group, each), group=group)
        else:
            work = dist.all_gather(out, values(case, rank, rank + 1), **options)
    elif name == "all_gather_object":
        told: list[Any] = [None] * size
        dist.all_gather_object(told, {"rank": rank, "tensor": own}, group=group)
        out = [each["tensor"] for each in told]
    elif name == "gather_object":
        gathered: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object(own, gathered, peer_first, group=group)
        out = gathered or []
    elif name == "scatter_object_list":
        came: list[Any] = [None]
        dist.scatter_object_list(
            came, [values(case, 10 + each) for each in range(size)] if rank == 0 else None, peer_first, group=group
        )
        out = came
    elif name == "all_to_all":
        out = [torch.zeros_like(own) for _ in range(size)]
        work = dist.all_to_all(out, [values(case, rank + 10 * each) for each in range(size)], **options)
    elif name == "all_to_all_single":
        source = values(case, rank, size).contiguous()
        out = [torch.zeros_like(source)]
        work = dist.all_to_all_single(out[0], source, **options)
    elif name == "all_to_all_uneven":
        counts = [1 + (rank + each) % 2 for each in range(size)]
        rows = (torch.arange(3 * sum(counts)).view(-1, 3) + rank).to(case.dtype)
        out = [torch.zeros_like(rows)]
        work = dist.all_to_all_single(out[0], rows, counts, counts, **options)
    elif name == "all_to_all_list_uneven":
        parts = [values(case, rank + 10 * each, 1 + (rank + each) % 2) for each in range(size)]
        out = [torch.zeros_like(values(case, each + 10 * rank, 1 + (rank + each) % 2)) for each in range(size)]
        if is_on_gloo(group):  # which refuses the list
            counts, whole = [each.shape[0] for each in parts], torch.cat(parts)
            came_whole = torch.zeros_like(whole)
            dist.all_to_all_single(came_whole, whole, counts, counts, group=group)
            out = list(came_whole.split(counts))
        else:
            work = dist.all_to_all(out, parts, **options)
    elif name == "gather":
        out = [torch.zeros_like(own) for _ in range(size)] if rank == 0 else []
        work = dist.gather(own, out or None, peer_first, **options)
    elif name == "scatter":
        parts = [values(case, 10 + each) for each in range(size)] if rank == 0 else None
        work = dist.scatter(out[0], parts, peer_first, **options)
    elif name in ("send_recv", "recv_any_source", "batch_isend_irecv"):
        out, work = _around(case, own, group, rank, size), None
    elif name == "barrier":
        work = dist.barrier(**options)
    if work is not None:
        work.wait()
    if name == "all_reduce_sparse":
        out = [out[0].coalesce().to_dense()]
    return out if name != "reduce" or rank == 0 else []


def is_on_gloo(group: Any) -> bool:
    return dist.get_backend(group) == "gloo"


def _around(case: Case, own: Tensor, group: Any, rank: int, size: int) -> list[Tensor]:
    """Each rank sends to the next and receives from the one before it."""
    own, out = own.contiguous(), torch.zeros_like(own).contiguous()
    if size == 1:
        return [own]
    following, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    if case.collective == "batch_isend_irecv":
        messages = [
            dist.P2POp(dist.irecv, out, before, group, tag=3),
            dist.P2POp(dist.isend, own, following, group, tag=3),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    elif case.collective == "recv_any_source":
        sent = dist.isend(own, following, group, tag=7)
        if case.is_async:
            received = dist.irecv(out, None, group, tag=7)
            received.wait()
        else:
            assert dist.recv(out, None, group, tag=7) == before
        sent.wait()
    elif case.is_async:
        works = [dist.isend(own, following, group, tag=5), dist.irecv(out, before, group, tag=5)]
        for work in works:
            work.wait()
    elif rank == 0:
        dist.send(own, following, group)
        dist.recv(out, before, group)
    else:
        dist.recv(out, before, group)
        dist.send(own, following, group)
    return [out]


def is_exact(case: Case, size: int) -> bool:
    """Whether Gloo's result is the only one: another order of summation can only change sums and products of floats."""
    has_rounding = case.dtype.is_floating_point or case.dtype.is_complex
    return size <= 2 or not has_rounding or case.op not in ("SUM", "AVG", "PRODUCT")


def is_close(one: Tensor, other: Tensor, magnitude: Tensor, size: int) -> bool:
    """Whether no element differs by more than `size` units in the last place of its `magnitude`.

    That is the result of the same collective of absolute values: what was rounded on the way was never larger.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    about = torch.finfo(one.dtype)
    difference, limit = (_parts(one) - _parts(other)).abs(), size * about.eps * _parts(magnitude)
    return bool((difference <= limit + size * about.eps * about.smallest_normal).all())


def _parts(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def compare(cases: list[Case], rank: int, size: int, groups: dict[str, dict[str, Any]]) -> tuple[list[str], set[Kind]]:
    """The cases in which murmura's result is not Gloo's, and the kinds of those that Gloo could carry out."""
    faults: list[str] = []
    compared: set[Kind] = set()
    for case in cases:
        if groups["gloo"][case.group] is None:
            continue
        members = dist.get_process_group_ranks(groups["gloo"][case.group])
        own, count = members.index(rank), len(members)
        try:
            wanted = call(case, groups["gloo"][case.group], own, count)
        except (RuntimeError, ValueError, TypeError) as refusal:
            wanted, told = None, refusal
        try:
            came = call(case, groups["murmura"][case.group], own, count)
        except (RuntimeError, ValueError, TypeError) as refusal:
            if wanted is not None:
                faults.append(f"{case} on rank {rank}: {type(refusal).__name__}: {refusal}")
            continue
        if wanted is None:
            del told
            continue
        compared.add(case.kind)
        pairs = list(zip(came, wanted, strict=True))
        if is_exact(case, count):
            alike = all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)
        else:
            magnitudes = call(replace(case, absolute=True), groups["gloo"][case.group], own, count)
            alike = all(is_close(*pair, each, count) for pair, each in zip(pairs, magnitudes, strict=True))
        if not alike:
            faults.append(f"{case} on rank {rank}: {came} is not {wanted}"[:600])
    return faults, compared


def run_grid(cases: list[Case]) -> tuple[list[str], set[Kind]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    pair, alone = [size - 1, 0], [[each] for each in range(size)]
    groups: dict[str, dict[str, Any]] = {}
    for backend in ("gloo", "murmura"):
        options: dict[str, Any] = {"backend": backend, "timeout": timedelta(seconds=SECONDS)}
        made = dist.new_group(sorted(pair), **options)
        singles = [dist.new_group(each, **options) for each in alone]
        groups[backend] = {
            "world": dist.new_group(**options),
            "pair": made if rank in pair else None,
            "alone": singles[rank],
        }
    return compare(cases, rank, size, groups)
