"""How a buffer is cut: every element once, in chunks of nearly one size, each segment in the order of its chunk."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from murmura.collectives.chunks import PIECE_BYTES, SMALL_BYTES, Segment, chunk_bounds, is_small, plan_segments

SIZES = (1, 2, 3, 4, 5, 7, 8, 16)
LENGTHS = (0, 1, 2, 3, 7, 8, 15, 1001, 65_536, 1_000_003)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("numel", LENGTHS)
def test_chunks_cover_a_buffer_once(numel: int, count: int) -> None:
    bounds = [chunk_bounds(numel, count, index) for index in range(count)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == numel
    assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))
    assert [stop - start for start, stop in bounds] == [
        numel // count + (index < numel % count) for index in range(count)
    ]


def test_earlier_chunks_take_the_remainder() -> None:
    assert [chunk_bounds(11, 4, index) for index in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert [chunk_bounds(2, 4, index) for index in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    assert [chunk_bounds(0, 2, index) for index in range(2)] == [(0, 0), (0, 0)]


@pytest.mark.parametrize("world_size", SIZES[1:])
def test_what_is_small_depends_on_bytes_times_peers(world_size: int) -> None:
    assert SMALL_BYTES == 256 * 1024
    limit = SMALL_BYTES // (world_size - 1)
    assert is_small(0, world_size)
    assert is_small(limit, world_size)
    assert not is_small(limit + 1, world_size)


def covered(segments: list[Segment]) -> list[int]:
    return [at for segment in segments for at in range(segment.start, segment.stop)]


def first_rank(numel: int, item_bytes: int, world_size: int, at: int) -> int:
    """With which rank the sum of the element at `at` begins."""
    if (world_size - 1) * numel * item_bytes <= 256 * 1024:
        return 0
    for chunk in range(world_size):
        start, stop = chunk_bounds(numel, world_size, chunk)
        if start <= at < stop:
            return chunk
    raise AssertionError(at)


@pytest.mark.parametrize("seed", range(60))
def test_segments_cover_a_range_once_and_know_their_order(seed: int) -> None:
    dice = random.Random(seed)
    world_size = dice.choice(SIZES)
    item_bytes = dice.choice((1, 2, 4, 8, 16))
    numel = dice.choice((0, 1, 5, 1001, 300_000 // item_bytes, 700_000))
    start = dice.randint(0, numel)
    stop = dice.randint(start, numel)
    segments = list(plan_segments(numel, item_bytes, world_size, start, stop))
    assert covered(segments) == list(range(start, stop))
    for segment in segments:
        assert 0 < (segment.stop - segment.start) * item_bytes <= max(PIECE_BYTES, item_bytes)
        for at in (segment.start, segment.stop - 1):
            assert segment.first == first_rank(numel, item_bytes, world_size, at)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("numel", [0, 3, 1001, 400_003])
def test_shares_of_the_ranks_are_the_whole(numel: int, world_size: int) -> None:
    """Whatever part a rank takes, an element's order is the same: it depends on its place in the whole alone."""
    whole = list(plan_segments(numel, 4, world_size, 0, numel))
    orders = {at: segment.first for segment in whole for at in (segment.start, segment.stop - 1)}
    shares: list[int] = []
    for rank in range(world_size):
        segments = list(plan_segments(numel, 4, world_size, *chunk_bounds(numel, world_size, rank)))
        shares += covered(segments)
        assert all(orders.get(segment.start, segment.first) == segment.first for segment in segments)
    assert shares == list(range(numel))
