"""Batches as torch's DataLoader makes them: as many on every rank, and the same again from any of them on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ddp.models import backward, on_ranks, weight, weights_of
from murmura import DDP, ConfigError, Transport
from murmura.data import Loader, loader


def numbers(length: int) -> Any:
    return range(length)  # any sequence is a data set


def batches(source: Loader) -> list[list[int]]:
    return [batch.tolist() for batch in source]


def everywhere(length: int, world_size: int, batch_size: int, **options: Any) -> list[list[list[int]]]:
    return [batches(loader(numbers(length), (rank, world_size), batch_size, **options)) for rank in range(world_size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
def test_as_many_batches_on_every_rank_and_every_sample_once(size: int) -> None:
    for length, batch_size in itertools.product([8, 9, 16, 17, 100, 101], [1, 2, 3, 4, 200]):
        ranks = everywhere(length, size, batch_size)
        assert {len(rank) for rank in ranks} == {len(loader(numbers(length), (0, size), batch_size))}
        assert sorted(index for rank in ranks for batch in rank for index in batch) == list(range(length))
        assert {len(batch) for rank in ranks for batch in rank[:-1]} <= {batch_size}
        assert all(0 < len(rank[-1]) <= batch_size + 1 for rank in ranks)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_only_whole_batches(size: int) -> None:
    for length in (12, 13, 23, 24):
        ranks = everywhere(length, size, 3, drop_last=True)
        assert all(len(batch) == 3 for rank in ranks for batch in rank)
        assert {len(rank) for rank in ranks} == {length // size // 3}


def test_passes_are_epochs() -> None:
    source, other = loader(numbers(20), (1, 2), 3), loader(numbers(20), (1, 2), 3)
    first, second = batches(source), batches(source)
    assert first != second
    assert source.epoch == 2
    other.set_epoch(1)
    assert batches(other) == second


def test_a_pass_that_was_left_begins_anew() -> None:
    source = loader(numbers(20), (0, 2), 3)
    peek = next(iter(source))
    assert batches(source)[0] == peek.tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_batches", [0, 1, 4])
def test_the_position_is_that_of_the_batches_handed_out(num_batches: int, num_workers: int) -> None:
    expected = loader(numbers(20), (1, 2), 3)
    rest = batches(expected)[num_batches:] + batches(expected)
    source = loader(numbers(20), (1, 2), 3, num_workers=num_workers)
    passing = iter(source)
    list(islice(passing, num_batches))
    state = source.state_dict()  # in the body of the loop, when workers have fetched more
    del passing
    resumed = loader(numbers(20), (1, 2), 3, num_workers=num_workers)
    resumed.load_state_dict(state)
    assert batches(resumed) + batches(resumed) == rest


def test_a_restored_position_survives_set_epoch() -> None:
    source, resumed = loader(numbers(20), (0, 2), 3), loader(numbers(20), (0, 2), 3)
    expected = [batches(source), batches(source)]
    passing = iter(source)
    third = [next(passing).tolist(), *([next(passing).tolist()])]
    resumed.load_state_dict(source.state_dict())
    for epoch in range(resumed.epoch, 4):
        resumed.set_epoch(epoch)
        expected.append(batches(resumed))
    again = loader(numbers(20), (0, 2), 3)
    assert [batches(again), batches(again)] == expected[:2]
    assert [batches(again), batches(again)] == [third + expected[2], expected[3]]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 2)])
def test_another_number_of_ranks_and_another_size_of_batches(before: int, after: int) -> None:
    consumed = []
    for rank in range(before):
        source = loader(numbers(101), (rank, before), 5)
        consumed += [index for batch in islice(source, 3) for index in batch.tolist()]
        if rank == 0:
            state = source.state_dict()
    resumed = [loader(numbers(101), (rank, after), 4) for rank in range(after)]
    for each in resumed:
        each.load_state_dict(state)
    left = [index for each in resumed for batch in batches(each) for index in batch]
    assert sorted(consumed + left) == list(range(101))


class Noisy(Dataset[Tensor]):
    """Random augmentation by all three generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def test_workers_draw_the_same_random_numbers_again() -> None:
    whole = list(loader(Noisy(), (0, 2), 3, num_workers=2))
    drawn = torch.cat(whole)[:, 1:]
    assert drawn.unique().numel() == drawn.numel()
    other = list(loader(Noisy(), (1, 2), 3, num_workers=2))
    assert torch.cat([drawn, torch.cat(other)[:, 1:]]).unique().numel() == 2 * drawn.numel()
    state = loader(Noisy(), (0, 2), 3).state_dict() | {"position": 6}
    resumed = loader(Noisy(), (0, 2), 3, num_workers=1)  # another number of workers makes no difference
    resumed.load_state_dict(state)
    assert torch.equal(torch.stack(list(resumed)), torch.stack(whole[1:]))


def test_a_pass_leaves_the_random_numbers_of_the_process_alone() -> None:
    before = torch.get_rng_state()
    batches(loader(numbers(20), (0, 2), 3))
    assert torch.equal(torch.get_rng_state(), before)


class Fetching(Dataset[int]):
    """A data set that fetches many at once."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return 8

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls.append(indices)
        return indices


def test_what_torch_understands_is_passed_on() -> None:
    dataset = Fetching()
    source = loader(dataset, (0, 2), 2, shuffle=False, collate_fn=tuple)
    assert list(source) == [(0, 2), (4, 6)]
    assert dataset.calls == [[0, 2], [4, 6]]
    pair = next(iter(loader(TensorDataset(torch.arange(4), torch.arange(4)), (0, 2), 2, shuffle=False)))
    assert [each.tolist() for each in pair] == [[0, 2], [0, 2]]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (numbers(8), {"batch_size": 0}, "batch_size=0"),
        (numbers(8), {"batch_size": 2, "sampler": [1]}, "sampler= is set by this loader"),
        (numbers(1), {"batch_size": 2}, "1 samples do not give each of 2 ranks one"),
        (Endless(), {"batch_size": 2}, "IterableDataset"),
    ],
)
def test_nonsense_is_refused(dataset: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loader(dataset, (0, 2), **options)


def train(transport: Transport, by_join: bool) -> Tensor:
    ddp = DDP(weight(), transport)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    source = loader(numbers(13), transport, 2)
    for batch in ddp.join(source) if by_join else source:
        optimizer.zero_grad()
        backward(ddp, float(batch.float().mean()))
        optimizer.step()
    ddp.close()
    return weights_of(ddp.module)


def test_uneven_data_trains_with_and_without_join() -> None:
    plain, joined = on_ranks(train, 4, False), on_ranks(train, 4, True)
    assert all(torch.equal(each, plain[0]) for each in [*plain, *joined])
