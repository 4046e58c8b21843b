"""Sinks write records: to a file of JSON lines for each rank, to TensorBoard, or to a function."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from murmura.errors import ConfigError, MurmuraError
from murmura.observe.record import Record

TAIL_BYTES = 64 * 2**10  # read from the end of a file to find its last line


@runtime_checkable
class Sink(Protocol):
    """Takes the records of one rank; called in the training thread."""

    def open(self, rank: int) -> None:
        """Called once, before the first record."""
        ...

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JSONLines:
    """Writes `folder`/rank-<rank>.jsonl: a record a line, complete as soon as it is written, one file for each rank.

    A file of an earlier run is replaced.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._file: IO[str] | None = None

    def open(self, rank: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path = self._folder / f"rank-{rank}.jsonl"
        self._file = open(self._path, "w", encoding="utf-8", buffering=1)

    def write(self, record: Record) -> None:
        assert self._file is not None
        try:
            self._file.write(record.to_json() + "\n")
        except OSError as error:  # that of a full disk names no file
            raise MurmuraError(f"records cannot be written to {self._path}: {error.strerror}.") from error

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what could not be written has been told
                self._file.close()


class TensorBoard:
    """Writes each rank's numbers to `folder`/rank-<rank>, for TensorBoard; needs the extra `murmura[tensorboard]`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("TensorBoard is not installed. Run: pip install 'murmura[tensorboard]'.") from error
        self._make_writer: Callable[[str], Any] = SummaryWriter
        self._folder = Path(folder)
        self._writer: Any = None

    def open(self, rank: int) -> None:
        self._writer = self._make_writer(str(self._folder / f"rank-{rank}"))

    def write(self, record: Record) -> None:
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Callback:
    """Calls a function with each record, in the training thread."""

    def __init__(self, function: Callable[[Record], object]) -> None:
        self._function = function

    def open(self, rank: int) -> None:
        """Nothing to open."""

    def write(self, record: Record) -> None:
        self._function(record)

    def close(self) -> None:
        """Nothing to close."""


def read_records(folder: str | os.PathLike[str]) -> dict[int, list[Record]]:
    """Return what `JSONLines` wrote to `folder`, by rank, without a line that is still being written."""
    return {
        rank: [Record.from_json(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        for rank, path in _files(folder).items()
    }


def latest_records(folder: str | os.PathLike[str]) -> dict[int, Record]:
    """Return each rank's newest record in `folder`, to watch a run from outside; ranks without records are left out."""
    latest = {}
    for rank, path in _files(folder).items():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
        if len(lines) > 1:
            latest[rank] = Record.from_json(lines[-2].decode())
    return latest


def _files(folder: str | os.PathLike[str]) -> Mapping[int, Path]:
    files = {int(path.stem.removeprefix("rank-")): path for path in Path(folder).glob("rank-*.jsonl")}
    return dict(sorted(files.items()))
