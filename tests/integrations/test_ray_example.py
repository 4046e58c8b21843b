"""examples/cluster/ray_train.py, on a Ray cluster of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from integrations.test_ray import wait_for_leftovers

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "cluster" / "ray_train.py"


@pytest.mark.timeout(400)
def test_the_example_trains(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "MURMURA_TEST": str(tmp_path)}
    environment["RAY_raylet_start_wait_time_s"] = "120"
    command = [sys.executable, str(SCRIPT), "--workers", "2", "--storage", str(tmp_path), "--algorithm", "diloco"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=350)
    wait_for_leftovers(str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"loss 0\.\d+ on 2 workers", done.stdout)
