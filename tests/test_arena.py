"""The allocator of shared memory hands out no byte twice, and gets everything back."""

from __future__ import annotations

import random

import pytest

from murmura.transports.shared_memory.arena import PAGE_BYTES, Arena, round_up

PAGES = 64


def filled(arena: Arena) -> list[int]:
    """The starts of as many single pages as there are."""
    starts = []
    while (start := arena.take(PAGE_BYTES)) is not None:
        starts.append(start)
    return starts


def test_round_up() -> None:
    assert [round_up(size) for size in (0, 1, 4095, 4096, 4097)] == [0, 4096, 4096, 4096, 8192]
    assert [round_up(size, 64) for size in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_every_page_can_be_had_once() -> None:
    arena = Arena(PAGES * PAGE_BYTES)
    assert sorted(filled(arena)) == [page * PAGE_BYTES for page in range(PAGES)]
    assert arena.take(1) is None


def test_nothing_is_still_a_place_of_its_own() -> None:
    arena = Arena(2 * PAGE_BYTES)
    assert {arena.take(0), arena.take(0)} == {0, PAGE_BYTES}
    assert arena.take(0) is None


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    arena = Arena(4 * PAGE_BYTES)
    assert arena.take(4 * PAGE_BYTES + 1) is None
    assert arena.take(4 * PAGE_BYTES) == 0


def test_a_freed_range_is_used_again() -> None:
    arena = Arena(4 * PAGE_BYTES)
    first, second = arena.take(PAGE_BYTES), arena.take(PAGE_BYTES)
    arena.give_back(first)
    assert arena.take(PAGE_BYTES) == first
    assert second == PAGE_BYTES


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_merge_whatever_order_they_come_back_in(order: tuple[int, ...]) -> None:
    arena = Arena(3 * PAGE_BYTES)
    starts = [arena.take(PAGE_BYTES) for _ in range(3)]
    for index in order:
        assert arena.give_back(starts[index]) == PAGE_BYTES
    assert arena.take(3 * PAGE_BYTES) == 0


def test_a_range_comes_back_only_once() -> None:
    arena = Arena(PAGE_BYTES)
    start = arena.take(1)
    arena.give_back(start)
    with pytest.raises(KeyError):
        arena.give_back(start)


@pytest.mark.parametrize("seed", range(30))
def test_ranges_never_overlap(seed: int) -> None:
    """Ranges are taken and given back at random; a plain set of pages says what must be free."""
    dice = random.Random(seed)
    arena = Arena(PAGES * PAGE_BYTES)
    taken: dict[int, set[int]] = {}
    for _ in range(400):
        if taken and dice.random() < 0.5:
            start = dice.choice(list(taken))
            assert arena.give_back(start) == len(taken.pop(start)) * PAGE_BYTES
            continue
        num_bytes = dice.randint(0, 12 * PAGE_BYTES)
        num_pages = max(1, -(-num_bytes // PAGE_BYTES))
        start = arena.take(num_bytes)
        in_use = set().union(*taken.values())
        free = [page not in in_use for page in range(PAGES)]
        if start is None:  # then there is no such run of free pages
            assert not any(all(free[at : at + num_pages]) for at in range(PAGES - num_pages + 1))
            continue
        assert start % PAGE_BYTES == 0
        pages = set(range(start // PAGE_BYTES, start // PAGE_BYTES + num_pages))
        assert pages <= set(range(PAGES))
        assert not pages & in_use
        taken[start] = pages
    for start in list(taken):
        arena.give_back(start)
    assert arena.take(PAGES * PAGE_BYTES) == 0
