"""prepare_model in the workers of a local Ray cluster: the numbers of the plain loop, checkpoints, restarts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from integrations.loops import far, mean

pytestmark = pytest.mark.timeout(400)
PARAMETERS = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]


def fit(folder: Path, num_workers: int, algorithm: str, **choices: Any) -> list[dict[str, Any]]:
    """What each worker found; Ray runs in a process of its own."""
    given = {"accumulate": 1, "precision": "no", "own": False, "kill_at": None, "backend": "gloo"} | choices
    given |= {"folder": str(folder), "num_workers": num_workers, "algorithm": algorithm}
    tests = str(Path(__file__).parent.parent)
    path = os.pathsep.join([tests, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    environment["MURMURA_TEST"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-m", "integrations.ray_programs", json.dumps(given)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=350,
    )
    wait_for_leftovers(str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(num_workers)]


def wait_for_leftovers(mark: str) -> None:
    """Wait for processes of Ray that outlive its shutdown for a while."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MURMURA_TEST") == mark:
                left.append(process)
    _, alive = psutil.wait_procs(left, timeout=20)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=20)


@pytest.mark.parametrize(
    ("name", "num_workers", "choices"),
    [
        ("gradient_allreduce", 4, {"accumulate": 4}),
        ("low_precision_decentralized", 2, {"precision": "bf16"}),
        ("diloco", 2, {"accumulate": 2, "backend": "murmura"}),
    ],
)
def test_the_weights_are_those_of_the_plain_loop(
    name: str, num_workers: int, choices: dict[str, Any], tmp_path: Path
) -> None:
    for worker in fit(tmp_path, num_workers, name, **choices):
        assert far(worker["found"], worker["plain"]) <= (1e-6 if "precision" in choices else 1e-9)
        assert (worker["world_size"], worker["backend"]) == (num_workers, choices.get("backend", "gloo"))


def test_gradient_allreduce_is_what_rays_own_wrapper_does(tmp_path: Path) -> None:
    for worker in fit(tmp_path, 2, "gradient_allreduce", own=True):
        assert far(worker["found"], worker["plain"]) <= 1e-9


@pytest.mark.parametrize("name", ["low_precision_decentralized", "diloco"])
def test_a_worker_that_dies_is_restarted_from_the_last_checkpoint(name: str, tmp_path: Path) -> None:
    workers = fit(tmp_path, 4 if name == "diloco" else 2, name, kill_at=4)
    for worker in workers:
        assert 1 <= worker["begin"] <= 4  # which report was the last that Ray has taken notice of
        assert far(worker["found"], worker["plain"]) <= 1e-12  # as if nothing had happened
    files = json.loads((tmp_path / "files-0.json").read_text())
    assert {"model.pt", "optimizers.pt", *(f"murmura-rank-{rank}.pt" for rank in range(len(workers)))} <= set(files)
    plain = torch.load(tmp_path / "mean.pt")
    assert far([plain[each] for each in PARAMETERS], mean([worker["found"] for worker in workers])) < 1e-12
