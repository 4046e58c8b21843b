"""Two ranks as two nodes of one process each: on CUDA they share a GPU, which NCCL takes from different hosts only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from integrations.loops import far
from murmura.tools.one_gpu import nccl_variables

SCRIPT = Path(__file__).parent / "frameworks_gpu.py"


def check(framework: str, folder: Path, device: str) -> None:
    """Every framework's weights are those of the plain loop."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    common |= {"LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), framework, str(folder), device],
            env={**os.environ, **common, **nccl_variables(rank), "RANK": str(rank), "NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=250)
        assert process.returncode == 0, output[-5000:]
    for rank in range(2):
        saved = torch.load(folder / f"rank-{rank}.pt")
        assert saved["backend"] == ("nccl" if device == "cuda" else "murmura")
        for case, (found, expected) in saved["found"].items():
            limit = 1e-9 if case.endswith(" no") else 1e-3 if device == "cuda" else 1e-6
            assert far(found, expected) <= limit, case
