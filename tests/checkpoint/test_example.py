"""The script in examples/ does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "resume_after_a_kill.py"


@pytest.mark.slow
def test_the_example_ends_with_the_same_bits() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    killed, complete, resumed = done.stdout.splitlines()
    assert "rank 1 was killed by SIGKILL" in killed
    assert complete == "complete checkpoints: step-000000010, step-000000015"
    assert resumed == "resumed at step 15; the weights after 24 steps: the same bits"
