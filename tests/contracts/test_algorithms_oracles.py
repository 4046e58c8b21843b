"""The simulations agree with each other, and with plain torch, wherever two algorithms are one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from contracts.training import OPTIMIZERS, assert_close, regression, scatter, spread, standing_still
from oracles.algorithms.gradients import AllReduce, QAdam
from oracles.algorithms.simulation import Rule, flat_of, lossy_mean, simulate
from oracles.algorithms.weights import AsyncModelAverage, Decentralized, DiLoCo, LocalSGD, LowPrecision

STEPS = 4
RULES = [
    AllReduce(),
    Decentralized("all", hierarchical=True),
    Decentralized("shift_one", hierarchical=True),
    LocalSGD(1),
    DiLoCo(2, lr=1.0, momentum=0.0),
    AsyncModelAverage(1),
    LowPrecision(torch.clone, hierarchical=True),
]


def exact(tensor: Tensor) -> Tensor:
    return tensor


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_one_replica_trains_as_if_alone(rule: Rule) -> None:
    assert_close(simulate(rule, regression("momentum"), 1, STEPS), simulate(Rule(), regression("momentum"), 1, STEPS))


@pytest.mark.parametrize("size", [2, 3])
def test_averaging_weights_after_every_step_is_averaging_gradients_for_plain_descent(size: int) -> None:
    wanted = simulate(AllReduce(), regression("sgd"), size, STEPS)
    assert spread(wanted[-1]) == 0
    assert_close(simulate(LocalSGD(1), regression("sgd"), size, STEPS), wanted)
    assert_close(simulate(DiLoCo(1, lr=1.0, momentum=0.0), regression("sgd"), size, STEPS), wanted)


@pytest.mark.parametrize("size", [2, 3])
def test_a_lossless_exchange_of_chunks_is_an_average(size: int) -> None:
    wanted = simulate(AllReduce(), regression("momentum"), size, STEPS)
    assert_close(simulate(AllReduce(q=exact), regression("momentum"), size, STEPS), wanted)
    assert_close(simulate(AllReduce(q=exact, hierarchical=True), regression("momentum"), size, STEPS), wanted)
    tensors = [torch.arange(7.0) * (rank + 1) for rank in range(size)]
    assert torch.equal(lossy_mean(tensors, exact), torch.arange(7.0) * (size + 1) / 2)


def test_warming_up_is_adam() -> None:
    wanted = simulate(AllReduce(), regression("adam"), 3, STEPS)
    assert_close(simulate(QAdam(exact, STEPS, lr=0.01), regression("adam"), 3, STEPS), wanted)


def test_hosts_of_one_rank_are_ranks_and_a_single_host_is_none() -> None:
    for mode in ("all", "shift_one"):
        flat = simulate(Decentralized(mode), regression(), 4, STEPS)
        for hosts in ([0, 1, 2, 3], [5, 5, 5, 5]):
            rule = Decentralized(mode, hierarchical=True)
            assert_close(simulate(rule, regression(), 4, STEPS, hosts), flat, within=0.0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gossip_keeps_the_mean_and_draws_replicas_together(optimizer: str) -> None:
    apart = simulate(Rule(), regression(optimizer), 4, 8)
    for mode in ("all", "shift_one"):
        together = simulate(Decentralized(mode), regression(optimizer), 4, 8)
        assert 0 < spread(together[-1]) < spread(apart[-1])


def test_a_lossless_ring_mixes_a_third_with_each_neighbour() -> None:
    rule = LowPrecision(torch.clone)
    first, second = simulate(rule, standing_still(), 4, 2, begin=scatter)
    apart = [flat_of(scattered(rank)) for rank in range(4)]
    assert_close([first], [apart])  # the replicas began equal, so there was nothing to mix
    assert_close([second], [[(apart[rank] + apart[rank - 1] + apart[(rank + 1) % 4]) / 3 for rank in range(4)]])
    for place in range(4):
        assert torch.equal(rule.left[place], rule.mine[(place - 1) % 4])
        assert torch.equal(rule.right[place], rule.mine[(place + 1) % 4])


def scattered(rank: int) -> nn.Module:
    model = standing_still().make_model()
    scatter(model, rank)
    return model
