"""The script of docs/transformers.md runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.pages import TORCHRUN, run_script_of


@pytest.mark.timeout(300)
def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    run_script_of("transformers.md", tmp_path, *TORCHRUN)
