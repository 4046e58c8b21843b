"""Lightning on murmura: logging, a world of one, and what users are told who do what cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations import lightning_task as loops
from integrations.ranks import run

pytestmark = pytest.mark.timeout(900)


def test_what_cannot_work_is_refused_with_what_to_do() -> None:
    for told in run("lightning_features:refusals", 2):
        assert told["unknown"].startswith("ConfigError: algorithm='sharding' is unknown")
        assert told["no algorithm"].startswith("ConfigError: algorithm=3 is no Algorithm")
        assert "MURMURA_TRANSPORT" in told["transport"]
        assert "LocalSGDAlgorithm(period)" in told["period"]
        assert told["unknown option"] == "TypeError: DDP() got an unexpected keyword argument 'shards'"
        assert told["size"] == "ConfigError: bucket_size_bytes=-1 must be a whole number, at least 1."
        assert "starts from equal weights" in told["start"]
        assert told["timeout"].startswith("ConfigError: timeout=-1 is no time above 0")
        assert told["good"] == "nothing"
        assert told["wrapped"].startswith("UsageError: this module, or a part of it, is already wrapped")
        assert "murmura_sharding" in told["name"]
        assert "pytorch_lightning.strategies.Strategy" in told["other package"]
        assert told["hook"] == "nothing"
        assert "a communication hook takes the place" in told["hook and diloco"]


def test_ranks_with_different_numbers_of_batches_end_with_an_error() -> None:
    told = run("lightning_features:uneven", 2)
    assert sorted(each.split(":")[0] for each in told) == ["PeerLost", "PeerTimeout"]


def test_a_world_of_one_trains() -> None:
    assert run("lightning_features:alone", 1)[0] <= 1e-6


def test_logging_and_gathering_go_over_all_ranks() -> None:
    for rank in run("lightning_features:logged", 2):
        assert rank["mean_epoch"] == 0.5
        assert rank["sum"] == 9.0
        assert rank["gathered"] == [[0], [1]]
        assert rank["integer"] == 1
        assert rank["told"] == "from 0"


@pytest.mark.parametrize("name", ["low_precision_decentralized", "diloco"])
def test_a_rank_that_skips_a_step_does_not_hold_up_the_others(name: str) -> None:
    first, second = run("lightning_features:skipped_steps", 2, name)
    assert first == second


def test_a_save_while_gradients_are_accumulated_warns_and_resumes(tmp_path: Path) -> None:
    for whole, resumed, warnings in run("lightning_features:saved_while_accumulating", 2, str(tmp_path)):
        assert len(warnings) == 1
        assert "gradients are being accumulated" in warnings[0]
        assert loops.distance(whole, resumed) > 0  # the gradients of two batches are lacking
        assert loops.distance(whole, resumed) < 0.5
