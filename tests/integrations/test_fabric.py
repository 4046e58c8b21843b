"""Fabric on murmura: the same weights as the plain loop, and as Fabric's own strategy; checkpoints; two models."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations import lightning_task as loops
from integrations.ranks import run

ALGORITHMS = ("gradient_allreduce", "low_precision_decentralized", "diloco")
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_loop_with_fabric_gives_the_weights_of_the_plain_one(name: str, world_size: int) -> None:
    ranks = run("fabric_programs:against_the_plain_loop", world_size, name)
    for case in loops.OPTIONS:
        for plain, own in (each[case] for each in ranks):
            assert loops.distance(plain, own) <= 1e-6, case
        same = all(loops.distance(ranks[0][case][1], each[case][1]) == 0 for each in ranks)
        assert same == (name == "gradient_allreduce"), case


def test_gradient_allreduce_gives_the_weights_of_fabrics_own_strategy() -> None:
    for rank in run("fabric_programs:against_fabrics_own", 2):
        for case, (theirs, ours) in rank.items():
            assert loops.distance(theirs, ours) <= 1e-6, case


@pytest.mark.parametrize("name", [*ALGORITHMS, "bytegrad"])
def test_a_checkpoint_holds_the_mean_and_a_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    ranks = run("fabric_programs:resumed", 2, name, str(tmp_path))
    for index, rank in enumerate(ranks):
        assert loops.distance(rank["whole"], rank["resumed"]) == 0
        assert rank["step"] == 11 + (index if name in ALGORITHMS[1:] else 0)
        assert rank["keys"] == ["model", "optimizer", "step"]
        if name in ALGORITHMS[1:]:
            assert loops.distance(rank["plain"], rank["mean"]) == 0
            assert loops.distance(rank["plain"], rank["at_save"]) > 0
        else:
            assert loops.distance(rank["plain"], ranks[0]["at_save"]) == 0


def test_two_models_train_side_by_side() -> None:
    for first, second in run("fabric_programs:two_models", 2):
        assert loops.distance(first, second) == 0


def test_bad_arguments_are_refused_before_anything_starts() -> None:
    unknown, no_algorithm, transport, no_fabric = run("fabric_programs:refusals", 1)[0]
    assert unknown.startswith("ConfigError: algorithm='sharding' is unknown")
    assert no_algorithm.startswith("ConfigError: algorithm=3 is no Algorithm")
    assert "MURMURA_TRANSPORT" in transport
    assert "fabric.setup()" in no_fabric
