"""The script of docs/accelerate.md runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.pages import TORCHRUN, run_script_of


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", [TORCHRUN, ()], ids=["two ranks", "one process"])
def test_the_script_of_the_page_runs(launcher: tuple[str, ...], tmp_path: Path) -> None:
    run_script_of("accelerate.md", tmp_path, *launcher)
