"""A run that was stopped and taken up again is, to the bit, the one that was not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from checkpoint.programs import NUM_STEPS, WAYS, train
from ddp.models import all_equal
from murmura import run_world
from worlds import SECONDS


@pytest.mark.parametrize("way", WAYS)
def test_stopped_and_taken_up_again(way: str, tmp_path: Path) -> None:
    whole = run_world(lambda transport: train(transport, way, None), 3, timeout=SECONDS)
    assert all_equal(weights for weights, _, _ in whole) is False  # of buffers at least
    for stop_at in (3, 6, 7):
        run_world(lambda transport, at=stop_at: train(transport, way, tmp_path, stop_at=at), 3, timeout=SECONDS)
    resumed = run_world(lambda transport: train(transport, way, tmp_path), 3, timeout=SECONDS)
    for (weights, _, rounds), (again, steps, rounds_again) in zip(whole, resumed, strict=True):
        assert steps == list(range(6, NUM_STEPS))  # step 7 was not saved
        assert rounds == rounds_again == NUM_STEPS
        assert torch.equal(weights, again)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written(way: str, tmp_path: Path) -> None:
    run_world(lambda transport: train(transport, way, tmp_path, stop_at=4), 3, timeout=SECONDS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000002", "step-000000004"]
    folder = tmp_path / "step-000000004"
    told = json.loads((folder / "manifest.json").read_text())
    assert (told["step"], told["world_size"], told["parts"]) == (4, 3, ["optimizer", "sampler", "scheduler"])
    assert told["replicas"] == ("differ" if WAYS[way].differ else "equal")
    files = {path.name for path in folder.iterdir()} - {"manifest.json"}
    common = set() if WAYS[way].differ else {"common.pt"}
    assert files == set(told["files"]) == {"model.pt", "rank-0.pt", "rank-1.pt", "rank-2.pt"} | common

    model = torch.load(folder / "model.pt", weights_only=True)
    ranks = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(3)]
    if WAYS[way].differ:
        shares = [1.0] * 3
        if way == "push_sum":  # which says how much each replica counts
            shares = ranks[0]["algorithm"]["algorithm"]["w"]
            assert max(shares) > 1.1
        for name, mean in model.items():
            if mean.is_floating_point():
                replicas = [share * rank["model"][name] for share, rank in zip(shares, ranks, strict=True)]
                torch.testing.assert_close(mean, torch.stack(replicas).mean(0))
        assert all(set(rank["parts"]) == set(told["parts"]) for rank in ranks)
    else:
        own = [set(rank["model"]) for rank in ranks]
        assert own[0] == set()
        assert own[1] == own[2] == {name for name in model if "running" in name}  # each has its own until a round
        assert all(rank["parts"] == {} for rank in ranks)
