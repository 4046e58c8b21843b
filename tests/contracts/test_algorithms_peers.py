"""Who meets whom: symmetric, nobody meets itself but to sit out, and everybody is met once a cycle."""

from __future__ import annotations

import pytest
import torch

from murmura import Transport, run_world
from murmura.algorithms.decentralized import pairs_of
from murmura.algorithms.peers import shift_one_peer
from oracles.algorithms import peers as oracle

SIZES = [*range(1, 13), 16, 33]


def peers_at(size: int, number: int) -> list[int]:
    return [shift_one_peer(rank, size, number) for rank in range(size)]


def test_peers_are_those_of_the_formula() -> None:
    for size in SIZES:
        for number in range(3 * size + 1):
            assert peers_at(size, number) == oracle.shift_one(size, number)


def test_pairing_is_mutual_and_one_rank_sits_out_if_they_are_odd() -> None:
    for size in SIZES:
        for number in range(2 * size):
            peers = peers_at(size, number)
            assert all(0 <= peer < size for peer in peers)
            assert [peers[peer] for peer in peers] == list(range(size))
            assert sum(peer == rank for rank, peer in enumerate(peers)) == size % 2


@pytest.mark.parametrize("size", [2, 4, 6, 8, 16])
def test_every_pair_across_the_halves_meets_once_a_cycle(size: int) -> None:
    half = size // 2
    pairs = [(rank, peers_at(size, number)[rank]) for number in range(half) for rank in range(half)]
    assert sorted(pairs) == [(lower, upper) for lower in range(half) for upper in range(half, size)]


@pytest.mark.parametrize("size", [1, 3, 5, 7, 33])
def test_with_odd_ranks_every_pair_meets_once_and_everybody_rests_once_a_cycle(size: int) -> None:
    pairs = [tuple(sorted((rank, peer))) for number in range(size) for rank, peer in enumerate(peers_at(size, number))]
    assert sorted(set(pairs)) == [(rank, peer) for rank in range(size) for peer in range(rank, size)]
    assert all(pairs.count(pair) == (2 if pair[0] < pair[1] else 1) for pair in set(pairs))


def means_with_peers(transport: Transport) -> list[float]:
    """The means with the peers of a cycle, each in a group of two; a rank that sits out keeps its own number."""
    pairs, found = pairs_of(transport), []
    for step in range(transport.world_size):
        peer = shift_one_peer(transport.rank, transport.world_size, step)
        own = torch.tensor([float(transport.rank)])
        found.append(float(own if peer == transport.rank else pairs[peer].all_reduce(own, "mean")))
    transport.barrier()
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_pairs_average_in_groups_of_two(kind: str, size: int) -> None:
    how = {"transport": "gloo"} if kind == "processes" else {}
    for rank, found in enumerate(run_world(means_with_peers, size, kind=kind, timeout=30, **how)):
        peers = [shift_one_peer(rank, size, step) for step in range(size)]
        assert found == [(rank + peer) / 2 for peer in peers]
