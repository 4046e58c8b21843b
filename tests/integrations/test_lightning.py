"""Lightning's Trainer on murmura: the same weights as the plain loop, and as Lightning's own strategy."""

from __future__ import annotations

import pytest

from integrations import lightning_task as loops
from integrations.ranks import run

ALGORITHMS = ("gradient_allreduce", "low_precision_decentralized", "diloco")
EQUAL = ("gradient_allreduce",)  # those that keep the replicas equal to the bit


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_fit_gives_the_weights_of_the_plain_loop_and_of_lightnings_own_strategy(name: str, world_size: int) -> None:
    ranks = run("lightning_programs:against_the_plain_loop", world_size, name)
    for case in loops.OPTIONS:
        for plain, own, _, lightnings in (each[case] for each in ranks):
            assert loops.distance(plain, own) <= 1e-6, case
            if lightnings is not None:  # of its own strategy, which averages gradients
                assert loops.distance(lightnings, own) <= 1e-6, case
        owns, afterwards = [each[case][1] for each in ranks], [each[case][2] for each in ranks]
        assert all(loops.distance(loops.mean(owns), each) <= 1e-6 for each in afterwards), case
        assert all(loops.distance(afterwards[0], each) == 0 for each in afterwards), case
        if name in EQUAL:
            assert all(loops.distance(owns[0], each) == 0 for each in owns), case
        else:
            assert all(loops.distance(owns[0], each) > 0 for each in owns[1:]), case


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_manual_optimization_with_two_optimizers_gives_the_weights_of_the_plain_loop(name: str) -> None:
    for plain, own in run("lightning_features:manual", 2, name):
        assert loops.distance(plain, own) <= 1e-6
