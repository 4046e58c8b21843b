"""The script of docs/ray.md runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations.pages import run_script_of
from integrations.test_ray import wait_for_leftovers


@pytest.mark.timeout(300)
def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    run_script_of("ray.md", tmp_path)
    wait_for_leftovers(str(tmp_path))
