"""Fits on murmura that validate, test, save, are killed and resume."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations import lightning_task as loops
from integrations.ranks import run

ALGORITHMS = ("gradient_allreduce", "low_precision_decentralized", "diloco")
DIFFERENT = ("low_precision_decentralized", "diloco")  # those whose replicas differ
pytestmark = pytest.mark.timeout(900)


def all_equal(replicas: list[loops.Weights]) -> bool:
    return all(loops.distance(replicas[0], each) == 0 for each in replicas)


@pytest.mark.parametrize(("name", "world_size"), [*itertools.product(ALGORITHMS, (2, 4)), ("bytegrad", 2)], ids=str)
def test_a_run_that_was_killed_and_resumed_equals_an_uninterrupted_one(
    name: str, world_size: int, tmp_path: Path
) -> None:
    whole, folder = (str(tmp_path / each) for each in ("whole", "killed"))
    expected = run("lightning_lives:live", world_size, name, whole)
    with pytest.raises(Exception, match=r"SIGKILL|signal 9|killed"):
        run("lightning_lives:live", world_size, name, folder, 4, True)
    resumed = run("lightning_lives:live", world_size, name, folder, 4, False, True)
    for one, other in zip(expected, resumed, strict=True):
        assert loops.distance(one["own"], other["own"]) == 0
        assert (one["lr"], one["steps"]) == (other["lr"], other["steps"])
        assert loops.distance(one["after"], other["after"]) == 0
    assert all_equal([each["after"] for each in resumed])
    plain = torch.load(f"{folder}/last.ckpt", weights_only=True)["state_dict"]
    plain = without_counts({name.removeprefix("net."): value for name, value in plain.items()})
    if name in DIFFERENT:
        assert not all_equal([each["own"] for each in resumed])
        assert loops.distance(plain, without_counts(loops.mean([each["own"] for each in resumed]))) <= 1e-6
    else:
        assert loops.distance(plain, without_counts(resumed[0]["own"])) == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_plain_file_holds_the_mean_and_a_fit_goes_on_from_each_ones_own(name: str, tmp_path: Path) -> None:
    ranks = run("lightning_lives:saved_after_the_fit", 2, name, str(tmp_path))
    for whole, resumed, plain, after in ranks:
        assert loops.distance(whole, resumed) == 0
        assert loops.distance(plain, after) == 0


def test_another_algorithm_is_told_to_leave_the_own_states_behind_and_then_goes_on_from_the_mean(
    tmp_path: Path,
) -> None:
    for told, plain, taken in run("lightning_lives:changed_algorithm", 2, str(tmp_path)):
        assert "was saved by DiLoCoAlgorithmImpl" in told
        assert "without that folder" in told
        assert loops.distance(plain, taken) == 0


def test_validation_sees_the_mean_and_training_goes_on_with_each_ones_own(tmp_path: Path) -> None:
    ranks = run("lightning_lives:validate", 2, "diloco", str(tmp_path))
    for seen in zip(*(each["validated"] for each in ranks), strict=True):
        assert all_equal(list(seen))
    for rank in ranks:
        assert all(loops.distance(*each) == 0 for each in zip(rank["before"], rank["after"], strict=True))
    first = [each["before"][1] for each in ranks]  # 0 is the sanity check, with equal weights
    assert not all_equal(first)
    assert loops.distance(without_counts(loops.mean(first)), without_counts(ranks[0]["validated"][2])) <= 1e-6


def without_counts(weights: loops.Weights) -> loops.Weights:
    return {name: value for name, value in weights.items() if "num_batches" not in name}


def test_after_a_fit_test_sees_the_mean_and_files_that_are_not_needed_are_gone(tmp_path: Path) -> None:
    ranks = run("lightning_lives:validate", 2, "diloco", str(tmp_path / "lr=[0.1]"))
    assert all_equal([each["tested"] for each in ranks])
    mean = without_counts(loops.mean([each["own"] for each in ranks]))
    assert loops.distance(mean, without_counts(ranks[0]["tested"])) <= 1e-6
    assert len({each["best"] for each in ranks}) == 1
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    assert len(ranks[0]["files"]) == 3  # the best, the last, and replicas/
    assert len(ranks[0]["replicas"]) == 4


@pytest.mark.parametrize("which", ["ema", "swa"])
@pytest.mark.parametrize("name", ["gradient_allreduce", "diloco"])
def test_averaged_weights_are_validated_and_kept_as_the_mean_of_the_replicas(
    name: str, which: str, tmp_path: Path
) -> None:
    ranks = run("lightning_lives:averaged", 2, name, which, str(tmp_path))
    assert all_equal([each["after"] for each in ranks])
    for seen in zip(*(each["validated"] for each in ranks), strict=True):
        assert all_equal([without_counts(each) for each in seen])
    for rank in ranks:
        assert loops.distance(rank["whole"], rank["resumed"]) == 0
    mean = loops.mean([each["whole"] for each in ranks])
    assert loops.distance(without_counts(mean), without_counts(ranks[0]["after"])) <= 1e-6
    if which == "swa" and name == "diloco":  # what SWA has averaged so far is in the plain file as a mean too
        plain, own = zip(*(each["averages"] for each in ranks), strict=True)
        assert not all_equal(list(own))
        assert all(loops.distance(each, loops.mean(list(own))) <= 1e-6 for each in plain)


def test_all_ranks_stop_and_lower_the_learning_rate_alike() -> None:
    first, second = run("lightning_lives:decisions", 2)
    assert first == second
    assert first["epochs"] == 3  # one that is better than none, and two that are not better
    assert first["Plateau"] < 0.01
    assert first["StepPlateau"] < 0.01


@pytest.mark.parametrize(
    ("which", "metric", "steps"), [("stopping", "val", 5), ("plateau", "val", 5), ("plateau of a step", "now", 2)]
)
def test_metrics_that_decide_must_be_equal_on_all_ranks(which: str, metric: str, steps: int) -> None:
    for told, after in run("lightning_lives:unequal", 2, which):
        assert after == steps  # when it is about to decide
        assert told.startswith(f"UsageError: {metric!r} decides")
        assert "rank 0" in told
        assert "rank 1" in told
        assert "sync_dist=True" in told


def test_a_rank_that_raises_ends_the_others_with_its_reason() -> None:
    with pytest.raises(Exception, match="no more") as told:
        run("lightning_features:one_rank_raises", 2)
    assert not isinstance(told.value, TimeoutError)


def test_tensors_stay_on_their_own_after_means_are_written() -> None:
    values: list[Any] = run("lightning_features:means", 2)
    for each in values:
        assert torch.equal(each["mean"], torch.tensor([1.5, 3.0]))
        assert each["half"].dtype is torch.bfloat16
        assert each["count"].item() == each["rank"]
