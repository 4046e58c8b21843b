"""Lightning and Fabric on CUDA: two NCCL ranks on one GPU, as two nodes of one process each. ``pytest -m gpu``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integrations import lightning_task as loops
from integrations.test_lightning_launchers import NOT_PASSED_ON, free_port
from murmura.tools.one_gpu import nccl_variables

SCRIPT = Path(__file__).parent / "lightning_gpu.py"


def ranks(folder: Path, device: str) -> list[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED_ON)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), device],
            env={**environment, **nccl_variables(rank), "NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def check(folder: Path, device: str, backend: str) -> None:
    for process in ranks(folder, device):
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output[-5000:]
    first, second = (torch.load(folder / f"rank-{rank}.pt") for rank in range(2))
    assert first["backend"] == second["backend"] == backend
    for case in first["found"]:
        limit = 1e-6 if case.endswith("32-true") else 1e-3
        for plain, own, _, fabric in (first["found"][case], second["found"][case]):
            assert loops.distance(plain, own) <= limit, case
            assert loops.distance(plain, fabric) <= limit, case
        assert loops.distance(first["found"][case][2], second["found"][case][2]) == 0, case
        if case.startswith("gradient_allreduce"):
            assert loops.distance(first["found"][case][1], second["found"][case][1]) == 0, case


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_lightning_and_fabric_on_cuda_give_the_weights_of_the_plain_loop(tmp_path: Path) -> None:
    check(tmp_path, "cuda", "nccl")


@pytest.mark.timeout(900)
def test_lightning_and_fabric_on_two_nodes_give_the_weights_of_the_plain_loop(tmp_path: Path) -> None:
    """The same on the CPU, where Lightning computes in bf16 if it is asked for fp16."""
    check(tmp_path, "cpu", "murmura")
