"""Progress of a measurement: rank 0 writes lines to a file, and a thread of the starting process reads them.

A file serves every way of starting ranks, and tells a rank that works from one that hangs.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from murmura import Transport

PROGRESS = "progress"  # the file, in the folder of a measurement
PERIOD_SECONDS = 0.25


class Progress(NamedTuple):
    """The progress of one stage, by number; at its end `rounds` is the number of rounds."""

    stage: int
    fraction: float
    rounds: int = 0


Tell = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Ignore the progress."""


class ProgressFile:
    """Writes progress, at most a few times a second; the end of a stage always."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now >= self._next or progress.fraction == 1:
            self._next = now + PERIOD_SECONDS
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(progress) + "\n")


def teller(transport: Transport, path: Path) -> Tell:
    """Return the function that takes a rank's progress: it writes to the file on rank 0 and does nothing elsewhere."""
    return ProgressFile(path) if transport.rank == 0 else silent


@contextlib.contextmanager
def watching(path: Path, on_progress: Tell) -> Iterator[None]:
    """Call `on_progress`, in a new thread, for each line that is written to `path`."""
    path.touch()
    line = ""
    with path.open(encoding="utf-8") as file:

        def read() -> None:
            nonlocal line
            while part := file.readline():
                line += part
                if line.endswith("\n"):
                    on_progress(Progress(*json.loads(line)))
                    line = ""

        with repeating(read, PERIOD_SECONDS):
            yield


@contextlib.contextmanager
def repeating(work: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call `work` in a new thread every so many seconds while the block runs, and once more at its end."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            work()
        work()

    thread = threading.Thread(target=repeat, name="murmura-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
