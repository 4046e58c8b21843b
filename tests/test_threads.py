"""How many threads share the work on a large message, and that torch keeps to it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

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
