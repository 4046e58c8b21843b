"""The script that a page of the documentation shows, run as a user would start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_script_of(page: str, folder: Path, *launcher: str) -> None:
    """Run the Python blocks of `page`, one after another, in `folder`."""
    path = folder / "train.py"
    text = (DOCS / page).read_text()
    path.write_text("\n\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_raylet_start_wait_time_s": "120", "MURMURA_TEST": str(folder)}
    command = [sys.executable, *launcher, str(path)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
