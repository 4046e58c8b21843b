"""A script with `strategy="murmura_…"` under Lightning's own launcher, torchrun, SLURM and `murmura run`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = str(Path(__file__).parent / "lightning_script.py")
NOT_PASSED_ON = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_")
pytestmark = pytest.mark.timeout(900)


def start(*command: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def check(folder: Path, *processes: subprocess.Popen[str]) -> None:
    """All end well, and the two ranks hold the same weights, which are the mean of their replicas."""
    for process in processes:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output[-5000:]
    ranks = [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]
    assert [(each["world"], each["steps"]) for each in ranks] == [(2, 5)] * 2
    for name, value in ranks[0]["weights"].items():
        assert torch.equal(value, ranks[1]["weights"][name])
    assert len(list((folder / "checkpoints").glob("replicas/*/*.pt"))) == 2


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def test_the_trainer_starts_the_other_ranks_itself(tmp_path: Path) -> None:
    check(tmp_path, start(sys.executable, SCRIPT, str(tmp_path)))


def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check(tmp_path, start(*torchrun, SCRIPT, str(tmp_path)))


def test_murmura_run_starts_the_ranks(tmp_path: Path) -> None:
    check(tmp_path, start(sys.executable, "-m", "murmura", "run", "-n", "2", SCRIPT, str(tmp_path)))


def test_slurms_variables_place_the_ranks(tmp_path: Path) -> None:
    """Without srun, which is not here."""
    job = {
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NAME": "training",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    check(
        tmp_path,
        *(
            start(sys.executable, SCRIPT, str(tmp_path), **job, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
            for rank in range(2)
        ),
    )


FORK_SERVER = """
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from murmura.integrations.lightning import MurmuraFabricStrategy, MurmuraStrategy

class Model(BoringModel):
    def on_train_start(self):
        check(self)

def check(module):
    assert not any(each.is_shared() for each in (*module.parameters(), *module.buffers()))

def setup(fabric, module):
    fabric.setup(module)
    check(module)

if __name__ == "__main__":
    place = {"accelerator": "cpu", "devices": 2}
    Trainer(strategy=MurmuraStrategy(start_method="forkserver"), fast_dev_run=True, **place).fit(Model())
    Fabric(strategy=MurmuraFabricStrategy(start_method="forkserver"), **place).launch(setup, torch.nn.BatchNorm1d(2))
"""


def test_ranks_do_not_train_in_memory_that_a_fork_server_shares_among_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORK_SERVER)
    process = start(sys.executable, "-W", "ignore", str(script), cwd=tmp_path)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-5000:]
