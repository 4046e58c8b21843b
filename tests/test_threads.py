"""How many threads share the work on a large message, and that torch keeps to it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from murmura import Transport, run_world
from murmura.collectives.reduction import Reduction
from murmura.transports.shared_memory import threads


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    ("cores", "ranks", "given", "expected"), [(16, 2, 8, 8), (16, 2, 16, 8), (16, 4, 2, 2), (2, 2, 2, 1), (2, 4, 1, 1)]
)
def test_a_rank_uses_its_threads_but_no_more_than_its_share_of_the_cores(
    cores: int, ranks: int, given: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    torch.set_num_threads(given)
    assert threads.num_threads(ranks) == expected


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_torch_gives_a_piece_to_no_more_threads_than_asked(dtype: torch.dtype) -> None:
    torch.set_num_threads(4)
    piece = threads.piece_bytes(2, dtype.itemsize) // dtype.itemsize
    assert piece <= 2 * threads.GRAIN
    torch.set_num_threads(2)
    assert threads.piece_bytes(2, dtype.itemsize) == 2 * threads.THREAD_BYTES
    torch.set_num_threads(1)
    assert threads.piece_bytes(1, dtype.itemsize) == threads.PIECE_BYTES


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 1_000_003])
def test_every_byte_is_copied(length: int, count: int) -> None:
    torch.set_num_threads(3)
    source = torch.arange(length).remainder_(251).add_(1).to(torch.uint8)
    target = torch.zeros_like(source)
    threads.copy(target, source, count)
    assert torch.equal(target, source)


LARGE = 4 * 2**20  # elements: above the size from which tensors are read where they lie, if they are seen often


def reduce_halves(transport: Transport) -> dict[str, int]:
    """The most elements that each way of reducing bf16 gives to an operation of torch at a time."""
    os.sched_getaffinity = lambda pid: {0, 1}  # type: ignore[assignment]
    torch.set_num_threads(8)
    reduce, lengths = Reduction.reduce, [0]

    def recorded(reduction: Reduction, inputs: object, out: torch.Tensor) -> None:
        lengths.append(out.numel())
        reduce(reduction, inputs, out)  # type: ignore[arg-type]

    Reduction.reduce = recorded  # type: ignore[method-assign]
    size, longest = transport.world_size, {}
    value, total = transport.rank + 1.0, size * (size + 1) / 2
    for numel in (100_000, LARGE):
        tensor, part = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel // size, dtype=torch.bfloat16)
        for way in ("all_reduce", "all_reduce async", "reduce_scatter"):
            lengths[:] = [0]
            for _ in range(5):
                tensor.fill_(value)
                if way == "reduce_scatter":
                    transport.reduce_scatter_into(part, tensor)
                elif way == "all_reduce":
                    transport.all_reduce(tensor)
                else:
                    transport.all_reduce(tensor, async_op=True).wait()
                assert (part if way == "reduce_scatter" else tensor).eq(total).all()
            longest[f"{way} of {numel}"] = max(lengths)
    return longest


def test_reductions_of_halves_keep_to_the_threads_of_the_rank() -> None:
    for longest in run_world(reduce_halves, 2, kind="processes"):
        assert all(0 < length <= threads.GRAIN for length in longest.values()), longest
