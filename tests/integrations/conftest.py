"""Tests of murmura inside other frameworks; `make test-integrations` runs them in an environment that has them all.

A file is skipped, with a reason, where the framework that its name tells is not installed. Nothing here imports a
framework in pytest's own process: what needs one runs on ranks.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import multiprocessing.forkserver
from pathlib import Path

import pytest

FRAMEWORKS = {
    "lightning": "lightning",
    "fabric": "lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "ray": "ray",
}  # what must be installed for test_<name>*.py


def framework(path: Path) -> str | None:
    """The package that the tests in `path` need, if they need one."""
    return next((needed for name, needed in FRAMEWORKS.items() if path.stem.startswith(f"test_{name}")), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needed = framework(item.path) if item.path.is_relative_to(Path(__file__).parent) else None
        if needed is not None and importlib.util.find_spec(needed) is None:
            item.add_marker(pytest.mark.skip(reason=f"{needed} is not installed: make test-integrations"))


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start the server that ranks are forked from with the frameworks imported, which takes seconds of each rank."""
    wanted = ["torch", "torch._dynamo", "murmura", "pytest", "torch.distributed", "lightning", "accelerate"]
    multiprocessing.set_forkserver_preload(wanted)  # those that are not installed are left out
    multiprocessing.forkserver.ensure_running()
