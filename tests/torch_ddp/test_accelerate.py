"""Accelerate's own test of gradient synchronisation, with `murmura.DDP` patched in for torch's class."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_accelerates_test_of_synchronisation_passes() -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install accelerate")
    script = Path(__file__).parent / "accelerate_sync.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert "19 of 19 passed" in run.stdout, run.stderr[-5000:]
