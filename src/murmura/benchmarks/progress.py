"""How far a measurement has come: rank 0 writes lines to a file, a thread of the starting process reads them.

A file serves every way of starting ranks, and tells a rank that works from one that hangs.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PERIOD_SECONDS = 0.25


@dataclass(frozen=True)
class Progress:
    """How far the size of this index has come; at its end `rounds` says how many there were."""

    index: int
    size_bytes: int
    fraction: float
    rounds: int = 0


class ProgressFile:
    """Writes the progress of rank 0, at most a few times a second; the end of a size always."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now >= self._next or progress.fraction == 1:
            self._next = now + PERIOD_SECONDS
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(progress)) + "\n")


def silent(progress: Progress) -> None:
    """What the other ranks do with their progress."""


@contextlib.contextmanager
def watching(path: Path, on_progress: Callable[[Progress], None]) -> Iterator[None]:
    """Call `on_progress`, in a thread of its own, for each line that comes to stand in `path`."""
    path.touch()
    ended = threading.Event()

    def watch() -> None:
        with path.open(encoding="utf-8") as file:
            line = ""
            while True:
                last = ended.is_set()  # asked before reading, so that the last line is read
                while part := file.readline():
                    line += part
                    if line.endswith("\n"):
                        on_progress(Progress(**json.loads(line)))
                        line = ""
                if last:
                    return
                ended.wait(PERIOD_SECONDS)

    thread = threading.Thread(target=watch, name="murmura-bench-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
