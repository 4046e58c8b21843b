"""There is one standing lab on a machine: tests that make it take turns, and none touches a user's."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from murmura import UsageError
from murmura.tools.lab import persistent


@pytest.fixture
def turn_with_the_standing_lab() -> Iterator[None]:
    with open(Path(tempfile.gettempdir()) / "test-murmura-lab.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest's own deadline ends the wait
        with contextlib.suppress(UsageError):
            pytest.skip(f"{persistent.find()} is up on this machine")
        yield
        persistent.down()
