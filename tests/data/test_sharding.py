"""Every sample is one rank's, in an order that all ranks know, from a position that any number of ranks can take up."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from murmura import ConfigError, UsageError, run_world
from murmura.data import ShardedSampler, loader

SIZES = (1, 2, 3, 4, 5, 7, 8)
LENGTHS = (0, 1, 3, 8, 1001)


def shards(length: int, world_size: int, **choices: bool | int) -> list[list[int]]:
    return [list(ShardedSampler(length, (rank, world_size), **choices)) for rank in range(world_size)]  # type: ignore[arg-type]


def dealt(parts: list[list[int]]) -> list[int]:
    """Parts of about one length, put together again as they were dealt out."""
    longest = max(map(len, parts))
    return [part[turn] for turn in range(longest) for part in parts if turn < len(part)]


@pytest.mark.parametrize("size", SIZES)
def test_every_sample_is_one_ranks(size: int) -> None:
    for length in LENGTHS:
        parts = shards(length, size)
        assert sorted(dealt(parts)) == list(range(length))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert [len(ShardedSampler(length, (rank, size))) for rank in range(size)] == list(map(len, parts))


@pytest.mark.parametrize("size", SIZES)
def test_what_does_not_go_round_can_be_left_out(size: int) -> None:
    for length in LENGTHS:
        parts = shards(length, size, drop_last=True)
        assert {len(part) for part in parts} == {length // size}
        assert dealt(parts) == dealt(shards(length, size))[: length // size * size]


def test_the_order_of_the_data() -> None:
    assert shards(7, 3, shuffle=False) == [[0, 3, 6], [1, 4], [2, 5]]


def test_orders_differ_from_epoch_to_epoch_and_repeat_from_run_to_run() -> None:
    orders = {}
    for seed in range(3):
        sampler = ShardedSampler(100, (0, 1), seed=seed)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            orders[seed, epoch] = tuple(sampler)
    assert len(set(orders.values())) == 9
    again = ShardedSampler(100, (0, 1), seed=1)
    again.set_epoch(2)
    assert tuple(again) == orders[1, 2]


def test_it_leaves_the_random_numbers_of_the_process_alone() -> None:
    before = torch.get_rng_state()
    list(ShardedSampler(100, (0, 2)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_transport_tells_the_place() -> None:
    parts = run_world(lambda transport: list(ShardedSampler(range(10), transport)), 3)
    assert parts == shards(10, 3)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 3), (4, 2), (2, 4), (4, 3), (1, 5), (5, 1)])
def test_any_number_of_ranks_goes_on_where_the_ranks_were(before: int, after: int) -> None:
    for length, num_each in itertools.product([0, 1, 3, 100, 101], [0, 1, 7, 20, 1000]):
        samplers = [ShardedSampler(length, (rank, before), seed=3) for rank in range(before)]
        seen = []
        for sampler in samplers:
            sampler.set_epoch(2)
            indices = list(sampler)[:num_each]
            seen += indices
            sampler.advance(len(indices))
        for rank in range(after):
            sampler = ShardedSampler(length, (rank, after), seed=3)
            sampler.load_state_dict(samplers[rank if before == after else 0].state_dict())
            assert sampler.epoch == 2
            assert len(sampler) == len(list(sampler))
            seen += list(sampler)
        assert sorted(seen) == list(range(length))


def test_a_rank_goes_on_in_its_own_order() -> None:
    for rank in range(3):
        whole, resumed = ShardedSampler(20, (rank, 3)), ShardedSampler(20, (rank, 3))
        expected = list(whole)
        whole.advance(4)
        resumed.load_state_dict(whole.state_dict())
        assert list(resumed) == expected[4:]


def test_a_new_epoch_begins_at_the_beginning_and_the_same_one_goes_on() -> None:
    sampler = ShardedSampler(10, (0, 1))
    sampler.advance(4)
    sampler.set_epoch(0)
    assert (sampler.position, len(sampler)) == (4, 6)
    sampler.set_epoch(1)
    assert (sampler.position, len(sampler)) == (0, 10)


@pytest.mark.parametrize("other", [ShardedSampler(11, (0, 2)), ShardedSampler(10, (0, 2), seed=1)])
def test_a_position_in_other_data_is_refused(other: ShardedSampler) -> None:
    with pytest.raises(ConfigError, match="missed or seen twice"):
        other.load_state_dict(ShardedSampler(10, (0, 2)).state_dict())


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="no length"):
        ShardedSampler(Endless(), (0, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank 2 is not in a world of 2"):
        ShardedSampler(10, (2, 2))
    with pytest.raises(ConfigError, match="seed=-1"):
        ShardedSampler(10, (0, 2), seed=-1)
    with pytest.raises(ConfigError, match="-1 samples"):
        ShardedSampler(-1, (0, 2))
    with pytest.raises(UsageError, match="epoch=-1"):
        ShardedSampler(10, (0, 2)).set_epoch(-1)


@pytest.mark.parametrize("value", [-1, 2.5, float("nan"), True, None, "x"])
def test_numbers_that_are_none_are_refused_by_their_name(value: Any) -> None:
    sampler = ShardedSampler(10, (0, 2))
    attempts = {
        "seed": lambda: ShardedSampler(10, (0, 2), seed=value),
        "rank": lambda: ShardedSampler(10, (value, 2)),
        "world_size": lambda: ShardedSampler(10, (0, value)),
        "batch_size": lambda: loader(range(10), (0, 2), batch_size=value),  # type: ignore[arg-type]
        "epoch": lambda: sampler.set_epoch(value),
        "num_samples": lambda: sampler.advance(value),
        "transport": lambda: ShardedSampler(10, value),
    }
    for name, attempt in attempts.items():
        with pytest.raises((ConfigError, UsageError), match=re.escape(f"{name}={value!r} ")):
            attempt()
    assert (sampler.epoch, sampler.position) == (0, 0)
