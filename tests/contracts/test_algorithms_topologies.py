"""Graphs of peers: who meets whom, plain averages over them, and push-sum where plain ones are biased."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.grids import SIZES, grid
from contracts.test_algorithms_state import check_resumption, run
from contracts.training import assert_close, by_step, regression, scatter, spread, standing_still, step, train_world
from murmura import DDP, ConfigError, DecentralizedAlgorithm, Neighbours, PushSumAlgorithm, Transport, run_world
from murmura.algorithms import mixing, topology_named, topology_names
from murmura.algorithms.topology import neighbours_of_all
from oracles.algorithms import push_sum as oracle
from oracles.algorithms.simulation import flat_of, simulate
from worlds import SECONDS

STEPS = 5
MATRICES: dict[str, oracle.Matrix] = {
    "all": oracle.everybody,
    "ring": oracle.ring,
    "shift_one": oracle.shifted,
    "one_peer_exponential": oracle.one_peer_exponential,
    "exponential": oracle.exponential,
    "random_matching": functools.partial(oracle.matched, 0),
    "random_matching:seed=3": functools.partial(oracle.matched, 3),
}


def matrix_of(found: Sequence[Neighbours]) -> Tensor:
    p = torch.zeros(len(found), len(found), dtype=torch.float64)
    for rank, each in enumerate(found):
        p[rank, rank] = each.weights[0]
        for peer, weight in zip(each.receives_from, each.weights[1:], strict=True):
            p[rank, peer] = weight
    return p


def matrix_at(name: str, size: int, number: int) -> Tensor:
    return matrix_of(neighbours_of_all(topology_named(name), size, number))


# The graphs


@pytest.mark.parametrize("name", topology_names())
def test_a_topology_that_is_built_in_keeps_the_mean(name: str) -> None:
    for size in range(1, 10):
        for number in range(12):
            p = matrix_at(name, size, number)
            assert torch.allclose(p.sum(0), torch.ones(size, dtype=torch.float64), rtol=0, atol=1e-15)
            assert torch.allclose(p.sum(1), torch.ones(size, dtype=torch.float64), rtol=0, atol=1e-15)
            assert torch.allclose(p, MATRICES[name](size, number), rtol=0, atol=1e-15)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_one_peer_at_a_time_makes_the_exact_mean_of_a_power_of_two(power: int) -> None:
    product = torch.eye(2**power, dtype=torch.float64)
    for number in range(power):
        product = matrix_at("one_peer_exponential", 2**power, number) @ product
    assert torch.equal(product, torch.full_like(product, 2.0**-power))


@pytest.mark.parametrize("seed", ["x", "1.5", "true"])
def test_a_seed_that_is_no_number_is_refused(seed: str) -> None:
    with pytest.raises(ConfigError, match=r"seed=.* must be a whole number"):
        topology_named(f"random_matching:seed={seed}")


def test_matchings_are_drawn_anew_from_their_seed() -> None:
    draws = [matrix_at("random_matching:seed=1", 6, number) for number in range(40)]
    assert all(int((each == 0.5).sum()) == 12 for each in draws)
    assert bool((sum(draws) > 0).all())  # type: ignore[operator]  # in time all meet
    other = [matrix_at("random_matching:seed=2", 6, number) for number in range(40)]
    assert any(not torch.equal(one, two) for one, two in zip(draws, other, strict=True))


@pytest.mark.parametrize("size", range(1, 10))
def test_matchings_are_perfect_symmetric_and_the_same_for_all(size: int) -> None:
    for number in range(30):
        p = matrix_at("random_matching:seed=3", size, number)  # of what each rank finds by itself
        sits_out = (p.diagonal() == 1).nonzero().view(-1).tolist()
        assert len(sits_out) == size % 2
        for rank in set(range(size)) - set(sits_out):
            assert sorted(p[rank].tolist()) == [0.0] * (size - 2) + [0.5, 0.5]
            assert p[rank, rank] == 0.5
        assert torch.equal(p, p.T)
        assert torch.equal(p @ p, p)  # who has met has met: the pairs are disjoint


@pytest.mark.parametrize("size", [4, 5, 6])
def test_every_pair_is_matched_as_often_as_any_other(size: int) -> None:
    num_draws, pairs = 3000, torch.ones(size, size, dtype=torch.float64).triu(1) > 0
    met = sum(matrix_at("random_matching", size, number) > 0 for number in range(num_draws))[pairs]  # type: ignore[index]
    expected = num_draws * (size // 2) / pairs.sum()
    assert float((met / expected - 1).abs().max()) < 0.15
    one, two = ([matrix_at(f"random_matching:seed={seed}", size, n) for n in range(30)] for seed in (1, 2))
    num_equal = sum(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert num_equal < 20  # seeds draw apart
    assert any(not torch.equal(a, b) for a, b in itertools.pairwise(one))  # and so do exchanges


# Plain averages


@grid("name, size", tuple(MATRICES), SIZES, sample=4)
def test_gossip_over_a_graph_is_as_simulated(name: str, size: int) -> None:
    task = regression("momentum")
    flats = by_step(train_world(size, DecentralizedAlgorithm(topology=name), task, STEPS, begin=scatter))
    assert_close(flats, simulate(oracle.Gossip(MATRICES[name]), task, size, STEPS, begin=scatter))


@pytest.mark.parametrize("hosts", [None, [0, 0, 1, 1]], ids=["ranks", "hosts"])
def test_a_pair_by_name_and_by_topology_are_the_same_bits(hosts: list[int] | None) -> None:
    task = regression("adam", torch.float32)
    by_mode, by_topology = (
        by_step(train_world(4, algorithm, task, STEPS, hosts))
        for algorithm in ("shift_one", "decentralized:topology=shift_one")
    )
    assert_close(by_topology, by_mode, within=0.0)


@pytest.mark.parametrize("algorithm", ["shift_one", "decentralized:topology=ring", "push_sum"])
def test_long_flats_are_mixed_in_segments(monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    task = regression("momentum")
    whole = by_step(train_world(3, algorithm, task, STEPS, begin=scatter))
    monkeypatch.setattr(mixing, "SEGMENT_BYTES", 5 * 8)  # the last one is shorter
    assert_close(by_step(train_world(3, algorithm, task, STEPS, begin=scatter)), whole)


# Push-sum


@grid("name, size", tuple(MATRICES), SIZES, sample=4)
def test_push_sum_is_as_simulated(name: str, size: int) -> None:
    task = regression("adam")
    flats = by_step(train_world(size, PushSumAlgorithm(name), task, STEPS, begin=scatter))
    assert_close(flats, simulate(oracle.PushSum(MATRICES[name]), task, size, STEPS, begin=scatter))


def lopsided(rank: int, size: int, number: int) -> Neighbours:
    """Rank 0 sends to all others, these to rank 0 and to the next one: what ranks receive does not sum up to 1."""
    share = {0: 1 / size, **dict.fromkeys(range(1, size), 1 / 3)}
    to = {each: sorted({0, each % (size - 1) + 1} - {each}) if each else [*range(1, size)] for each in range(size)}
    for each in range(1, size):
        share[each] = 1 / (1 + len(to[each]))
    senders = [each for each in range(size) if rank in to[each]]
    return Neighbours(to[rank], senders, [share[rank], *(share[each] for each in senders)])


def lopsided_matrix(size: int, number: int) -> Tensor:
    return matrix_of(neighbours_of_all(lopsided, size, number))


@pytest.mark.parametrize("size", [4, 5])
def test_push_sum_over_a_lopsided_graph_is_as_simulated(size: int) -> None:
    task = regression("momentum")
    flats = by_step(train_world(size, PushSumAlgorithm(lopsided), task, STEPS, begin=scatter))
    assert_close(flats, simulate(oracle.PushSum(lopsided_matrix), task, size, STEPS, begin=scatter))


def mean_of_replicas(ddp: DDP) -> tuple[Tensor, float]:
    with ddp.average_parameters():
        return flat_of(ddp.module), ddp.algorithm.weight_in_mean


def test_push_sum_reaches_the_mean_where_plain_averages_are_biased() -> None:
    size, steps = 4, 60
    task = standing_still()
    runs = train_world(size, PushSumAlgorithm(lopsided), task, steps, begin=scatter, observe=mean_of_replicas)
    models = [task.make_model() for _ in range(size)]
    for rank, model in enumerate(models):
        scatter(model, rank)
    mean = torch.stack([flat_of(model) for model in models]).mean(0)
    for run_ in runs:
        for flat, _ in run_.observed:
            assert torch.allclose(flat, mean, rtol=0, atol=1e-12)
        assert torch.allclose(run_.flats[-1], mean, rtol=0, atol=1e-9)
    weights = [run_.observed[-1][1] for run_ in runs]
    assert sum(weights) == pytest.approx(size, abs=1e-12)
    assert max(weights) > 1.2  # so that the plain mean of replicas on their way is another
    p = lopsided_matrix(size, 0)
    plain = torch.linalg.matrix_power(p / p.sum(1, keepdim=True), steps) @ torch.stack([flat_of(m) for m in models])
    assert spread(list(plain)) < 1e-9
    assert float((plain[0] - mean).abs().max()) > 0.01


def test_a_parameter_that_is_thawed_has_its_rank_s_share_in_push_sum() -> None:
    """It was equal on all ranks, and nobody moves it: so it stays, whatever weights the ranks have by then."""

    def visit(transport: Transport) -> tuple[Tensor, Tensor, float]:
        task = standing_still()
        model = task.make_model()
        thawed = next(iter(model.parameters()))
        thawed.requires_grad_(False)
        before = thawed.clone()
        ddp = DDP(model, transport, algorithm=PushSumAlgorithm(lopsided))
        optimizer = task.make_optimizer(model.parameters())
        for number in range(4):
            thawed.requires_grad_(number >= 2)
            step(ddp, optimizer, task, number, transport.rank)
        ddp.close()
        return thawed.detach(), before, ddp.algorithm.weight_in_mean

    found = run_world(visit, 4, timeout=SECONDS)
    assert len({weight for _, _, weight in found}) > 1
    assert all(torch.allclose(after, before, rtol=0, atol=1e-12) for after, before, _ in found)


def test_other_algorithms_begin_from_the_mean_of_push_sum() -> None:
    def visit(transport: Transport) -> tuple[Tensor, Tensor, float]:
        task = regression("sgd")
        ddp = DDP(task.make_model(), transport, algorithm=PushSumAlgorithm(lopsided))
        optimizer = task.make_optimizer(ddp.parameters())
        for number in range(3):
            step(ddp, optimizer, task, number, transport.rank)
        assert ddp.consensus_distance() > 0
        with ddp.average_parameters():
            wanted = flat_of(ddp.module)
        weight = ddp.algorithm.weight_in_mean
        ddp.set_algorithm("gradient_allreduce")
        found = flat_of(ddp.module)
        step(ddp, optimizer, task, 3, transport.rank)
        ddp.verify_in_sync()
        ddp.set_algorithm("push_sum")
        step(ddp, optimizer, task, 4, transport.rank)
        ddp.close()
        return wanted, found, weight

    found = run_world(visit, 4, timeout=SECONDS)
    assert all(torch.equal(each[0], found[0][0]) for each in found)
    assert all(torch.equal(wanted, other) for wanted, other, _ in found)
    assert len({weight for _, _, weight in found}) > 1


def test_a_resumed_run_continues_bit_for_bit() -> None:
    check_resumption(4, PushSumAlgorithm(lopsided), regression("momentum", torch.float32))


def test_other_numbers_of_ranks_are_refused() -> None:
    algorithm, task = PushSumAlgorithm(), regression()
    saved = [states[-1] for _, states in run_world(run, 3, algorithm, task, range(2), timeout=SECONDS)]
    with pytest.raises(ConfigError, match="saved by 3 ranks, and here are 2"):
        run_world(run, 2, algorithm, task, [2], saved, timeout=SECONDS)


# Refusals


def one_sided(rank: int, size: int, number: int) -> Neighbours:
    return Neighbours([1] if rank == 0 else [], [], [1.0])


def to_itself(rank: int, size: int, number: int) -> Neighbours:
    return Neighbours([rank], [rank], [0.5, 0.5])


def too_few_weights(rank: int, size: int, number: int) -> Neighbours:
    return Neighbours([(rank + 1) % size], [(rank - 1) % size], [1.0])


def out_of_nothing(rank: int, size: int, number: int) -> Neighbours:
    return Neighbours([(rank + 1) % size], [(rank - 1) % size], [1.0, 0.5])


@pytest.mark.parametrize(
    ("topology", "told"),
    [
        (one_sided, "rank 0 sends to rank 1, which does not expect it"),
        (to_itself, r"rank 0 has the peers \[0\]"),
        (too_few_weights, r"rank 0 has the weights \[1.0\]"),
        (lambda rank, size, number: 7, "for rank 0 it returned 7. Return Neighbours"),
        (lambda rank, size, number: ([1.0], [], [1.0]), r"for rank 0 it returned \(\[1.0\]"),
        (out_of_nothing, r"hands out 1.5 times what it holds|would be biased"),
    ],
)
def test_a_graph_that_does_not_add_up_is_refused_before_anything_is_sent(topology: Any, told: str) -> None:
    for algorithm in (PushSumAlgorithm(topology), DecentralizedAlgorithm(topology=topology)):
        with pytest.raises(ConfigError, match=told):
            train_world(3, algorithm, regression(), 1)


def one_way(kept: float, rank: int, size: int, number: int) -> Neighbours:
    """Rank 0 hands out all but `kept` of what it holds, and nothing comes back."""
    return Neighbours([1], [], [kept]) if rank == 0 else Neighbours([], [0], [1.0, 1 - kept])


def test_a_rank_that_is_left_with_nothing_is_named_instead_of_weights_that_are_none() -> None:
    with pytest.raises(ConfigError, match="exchange 0: rank 0 is left with 0 of one share"):
        train_world(2, PushSumAlgorithm(functools.partial(one_way, 0.0)), regression(), 1)
    with pytest.raises(ConfigError, match=r"exchange 6: rank 0 is left with 4.7.*e-07 of one share"):
        train_world(2, PushSumAlgorithm(functools.partial(one_way, 0.125)), standing_still(), 10)


def test_what_is_no_topology_is_refused() -> None:
    for make in (PushSumAlgorithm, lambda choice: DecentralizedAlgorithm(topology=choice)):
        for choice in ("circle", 7):
            with pytest.raises(ConfigError, match="topology="):
                make(choice)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Give one"):
        DecentralizedAlgorithm(peer_selection_mode="shift_one", topology="ring")
    with pytest.raises(ConfigError, match=r"would be biased\. .*PushSumAlgorithm"):
        train_world(4, DecentralizedAlgorithm(topology=lopsided), regression(), 1)
    with pytest.raises(ConfigError, match="as many ranks on every host"):
        train_world(3, DecentralizedAlgorithm(topology="ring"), regression(), 1, [0, 0, 1])


def test_formulas_count_peers() -> None:
    assert PushSumAlgorithm().bytes_per_round(1000, 8) == 4000
    assert PushSumAlgorithm("exponential").bytes_per_round(1000, 8) == 3 * 4000
    assert DecentralizedAlgorithm(topology="ring", communication_interval=2).bytes_per_round(1000, 5) == 4000
    assert DecentralizedAlgorithm(topology="random_matching").bytes_per_round([[10, 100]], 3) == pytest.approx(8000 / 3)
