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
from integrations.ranks import run

pytestmark = pytest.mark.timeout(1200)
PARAMETERS = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
CASES: dict[str, dict[str, Any]] = {
    "four": {"num_workers": 4, "backend": "gloo", "algorithm": None},
    "two": {"num_workers": 2, "backend": "murmura", "algorithm": None},
} | {
    f"killed, {algorithm}, {num_workers}": {"num_workers": num_workers, "backend": backend, "algorithm": algorithm}
    for algorithm in ("gradient_allreduce", "low_precision_decentralized", "diloco")
    for num_workers, backend in ((2, "murmura"), (4, "gloo"))
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers of each case left what they found; one Ray cluster, in its own process, has run them all."""
    folder = tmp_path_factory.mktemp("ray")
    choices = []
    for name, case in CASES.items():
        (folder / name).mkdir()
        choices.append({**case, "folder": str(folder / name)})
    path = os.pathsep.join([str(Path(__file__).parent.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    environment |= {"RAY_raylet_start_wait_time_s": "120", "MURMURA_TEST": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "integrations.ray_programs", json.dumps(choices)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    wait_for_leftovers(str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


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


def workers_of(folder: Path, case: str) -> list[dict[str, Any]]:
    error = folder / case / "error.txt"
    assert not error.exists(), error.read_text()[-4000:]
    return [torch.load(folder / case / f"rank-{rank}.pt") for rank in range(CASES[case]["num_workers"])]


@pytest.mark.parametrize("case", ["two", "four"])
def test_the_weights_are_those_of_the_plain_loop(case: str, folder: Path) -> None:
    """Also Ray's own wrapper's, where gradients are averaged."""
    workers = workers_of(folder, case)
    for worker in workers:
        for name, (found, plain) in worker["pairs"].items():
            assert far(found, plain) <= (1e-6 if "bf16" in name else 1e-9), name
            if name != "gradients, Ray's own":
                is_equal = far(found, workers[0]["pairs"][name][0]) == 0.0
                assert is_equal == (name.startswith("gradients") or worker is workers[0]), name
        assert (worker["world_size"], worker["backend"]) == (CASES[case]["num_workers"], CASES[case]["backend"])


def test_a_model_that_is_wrapped_is_refused(folder: Path) -> None:
    for worker in workers_of(folder, "two"):
        assert len(worker["refused"]) == 2
        assert all("already wrapped" in each for each in worker["refused"]), worker["refused"]


def test_what_is_no_wrapper_or_no_checkpoint_is_named() -> None:
    *bare, nothing = run("ray_programs:wrong_values", 1)[0]
    assert bare == ["model is a Linear. Pass the murmura.DDP that prepare_model() returned."] * 2
    assert nothing.startswith("checkpoint=None is no ray.train.Checkpoint")


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("killed")])
def test_a_worker_that_dies_is_restarted_from_the_last_checkpoint(case: str, folder: Path) -> None:
    workers = workers_of(folder, case)
    for worker in workers:
        assert 1 <= worker["begin"] <= 4  # which report was the last that Ray has taken notice of
        assert far(*worker["pair"]) <= 1e-12  # as if nothing had happened
    files = json.loads((folder / case / "files-0.json").read_text())
    assert {"model.pt", "optimizers.pt", *(f"murmura-rank-{rank}.pt" for rank in range(len(workers)))} <= set(files)
    plain = torch.load(folder / case / "mean.pt")
    assert far([plain[each] for each in PARAMETERS], mean([worker["pair"][0] for worker in workers])) < 1e-12
