"""What `murmura.DDP(model)` takes by itself under real torchrun, with two ranks on one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]


def found_by(tmp_path: Path, group: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("torchrun_script.py")
    ended = subprocess.run(
        [*command, str(script), str(tmp_path / "found"), group],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2)]
    assert found[0]["weights"] == found[1]["weights"]
    assert all(len(each["taken"]) == 1 for each in found), found
    return found


def test_ranks_that_share_a_gpu_take_shared_memory_and_say_so_once(tmp_path: Path) -> None:
    for each in found_by(tmp_path, "none"):
        assert each["transport"] == "SharedMemoryTransport"
        assert "share a GPU" in each["taken"][0]
        (warning,) = each["warnings"]
        assert "staged through host memory" in warning
        assert "NCCL" in warning


def test_the_users_nccl_group_is_taken(tmp_path: Path) -> None:
    for each in found_by(tmp_path, "nccl"):
        assert each["transport"] == "ProcessGroupTransport"
        assert each["is_user_group"]
        assert "process group is one of NCCL" in each["taken"][0]
        assert each["warnings"] == []
