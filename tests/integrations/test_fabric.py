"""Fabric on murmura: the same weights as the plain loop, and as Fabric's own strategy; checkpoints; two models."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from integrations import lightning_task as loops
from integrations.pages import TORCHRUN
from integrations.ranks import run
from integrations.test_lightning_docs import SCRIPTS
from integrations.test_lightning_launchers import start

ALGORITHMS = ("gradient_allreduce", "low_precision_decentralized", "diloco")
DIFFERENT = ("low_precision_decentralized", "diloco", "phased")  # those whose replicas differ at the save
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_loop_gives_the_weights_of_the_plain_one_and_of_fabrics_own_strategy(name: str, world_size: int) -> None:
    ranks = run("fabric_programs:against_the_plain_loop", world_size, name)
    for case in loops.OPTIONS:
        for plain, own, fabrics in (each[case] for each in ranks):
            assert loops.distance(plain, own) <= 1e-6, case
            if fabrics is not None:  # of its own strategy, which averages gradients
                assert loops.distance(fabrics, own) <= 1e-6, case
        same = all(loops.distance(ranks[0][case][1], each[case][1]) == 0 for each in ranks)
        assert same == (name == "gradient_allreduce"), case


@pytest.mark.parametrize("name", [*ALGORITHMS, "bytegrad", "phased"])
def test_a_checkpoint_holds_the_mean_and_a_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    ranks = run("fabric_programs:resumed", 2, name, str(tmp_path))
    for index, rank in enumerate(ranks):
        assert loops.distance(rank["whole"], rank["resumed"]) == 0
        assert rank["step"] == 11 + (index if name in DIFFERENT else 0)
        assert rank["keys"] == ["model", "optimizer", "step"]
        if name in DIFFERENT:
            assert loops.distance(rank["plain"], rank["mean"]) == 0
            assert loops.distance(rank["plain"], rank["at_save"]) > 0
        else:
            assert loops.distance(rank["plain"], ranks[0]["at_save"]) == 0


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_killed_and_resumed_is_as_never_stopped(name: str, world_size: int, tmp_path: Path) -> None:
    whole = run("fabric_programs:from_the_file", world_size, name, None)
    with pytest.raises(Exception, match=r"SIGKILL|signal 9|killed"):
        run("fabric_programs:killed", world_size, name, str(tmp_path))
    resumed = run("fabric_programs:from_the_file", world_size, name, str(tmp_path / "checkpoint.ckpt"))
    for one, other in zip(whole, resumed, strict=True):
        assert loops.distance(one, other) == 0
    parameters = [each for each in whole[0] if "running" not in each]  # statistics are those of a rank's last batch
    assert all(torch.equal(whole[0][each], whole[1][each]) for each in parameters) == (name not in DIFFERENT)


def test_moments_are_averaged_at_a_change_of_algorithm_right_after_a_load(tmp_path: Path) -> None:
    (before, after), (others_before, others_after) = run("fabric_programs:moments_after_a_change", 2, str(tmp_path))
    assert not all(map(torch.equal, before, others_before))
    assert all(map(torch.equal, after, others_after))


def test_another_algorithm_is_told_to_leave_the_own_states_behind(tmp_path: Path) -> None:
    assert all("without that folder" in told for told in run("fabric_programs:changed_algorithm", 2, str(tmp_path)))


def test_torchrun_starts_the_ranks_of_a_script(tmp_path: Path) -> None:
    """The second script of the page, which starts its other rank itself in the test of the page."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPTS[1])
    process = start(sys.executable, *TORCHRUN, str(path), TMPDIR=str(tmp_path))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-5000:]
    assert len(list(tmp_path.rglob("replicas/*/*-rank-*.pt"))) == 2


def test_two_models_train_side_by_side() -> None:
    for first, second in run("fabric_programs:two_models", 2):
        assert loops.distance(first, second) == 0


def test_bad_arguments_are_refused_before_anything_starts() -> None:
    unknown, no_algorithm, transport, option, size, timeout, no_fabric = run("fabric_programs:refusals", 1)[0]
    assert unknown.startswith("ConfigError: algorithm='sharding' is unknown")
    assert no_algorithm.startswith("ConfigError: algorithm=3 is no Algorithm")
    assert "MURMURA_TRANSPORT" in transport
    assert option == "TypeError: DDP() got an unexpected keyword argument 'shards'"
    assert size == "ConfigError: bucket_size_bytes=-1 must be a whole number, at least 1."
    assert timeout.startswith("ConfigError: timeout=-1 is no time above 0")
    assert "fabric.setup()" in no_fabric
