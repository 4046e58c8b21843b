"""The scripts of docs/lightning.md run, each as a user would start it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from integrations.test_lightning_launchers import start

PAGE = Path(__file__).parent.parent.parent / "docs" / "lightning.md"
SCRIPTS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("index", range(len(SCRIPTS)))
def test_a_script_of_the_page_runs(index: int, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPTS[index])
    process = start(sys.executable, "-W", "ignore", str(path), TMPDIR=str(tmp_path))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-5000:]
    assert list(tmp_path.rglob("replicas/*/*-rank-1.pt"))
