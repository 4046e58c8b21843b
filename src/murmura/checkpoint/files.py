"""Checkpoint files: hashed while they are written, synced to disk, and read back only if their checksums are right.

Reading never runs code out of a file: tensors are loaded with ``weights_only=True``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from murmura.errors import CheckpointError, ConfigError, UsageError

_BLOCK_BYTES = 4 * 2**20
_FORBIDDEN = re.compile(r"GLOBAL (\S+)")  # in what torch says of a class that it does not create


@dataclass(frozen=True)
class Checksum:
    """The checksum and the size of a complete file."""

    sha256: str
    num_bytes: int


class _HashingWriter:
    """A file for `torch.save` that hashes what is written, and keeps the OSError that torch replaces by its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._num_bytes = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._hash.update(data)
        self._num_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def checksum(self) -> Checksum:
        return Checksum(self._hash.hexdigest(), self._num_bytes)


def write_tensors(path: Path, tree: dict[str, Any]) -> Checksum:
    """Write nested dicts and lists of tensors and plain values to disk and return the checksum.

    An object that could not be read back without running its code is a `UsageError`.
    """
    with _naming(path), open(path, "wb") as file:
        hashing = _HashingWriter(file)
        try:
            torch.save(tree, cast(IO[bytes], hashing))
        except RuntimeError:
            if hashing.failure is not None:
                raise hashing.failure from None
            raise
        file.flush()
        os.fsync(file.fileno())
    try:
        torch.load(path, weights_only=True, mmap=True, map_location="cpu")  # the tensors themselves are not read
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{_forbidden(error)} cannot be saved: reading it back would run code out of the file. Keep tensors, "
            "numbers, strings, lists and dicts in state_dict(), for instance float(x) in the place of a numpy number."
        ) from None
    return hashing.checksum()


def read_tensors(path: Path, wanted: Checksum) -> dict[str, Any]:
    """Read what `write_tensors` wrote, to the CPU; a `CheckpointError` if the file has changed."""
    verify_checksum(path, wanted)
    try:
        tree: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # the checksum is right, so the file was made by hand: torch may raise anything
        # Torch's message is not repeated: it advises to read without weights_only, which would run the file's code.
        what = f"holds {_forbidden(error)}" if isinstance(error, pickle.UnpicklingError) else "is in another format"
        raise CheckpointError(
            f"{path} {what}, and only tensors and plain values are read: a checkpoint runs no code. "
            "It was not written by Checkpointer, so ask where it comes from"
        ) from None
    return tree


def load_tensors(path: Path) -> dict[str, Any]:
    """Read a dict that `write_tensors` wrote, to the CPU, without a checksum; a `CheckpointError` if it is damaged."""
    try:
        tree = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # of a file that was cut short torch may raise anything, "Invalid argument" too
        if isinstance(error, OSError) and error.filename is not None:  # it cannot be opened
            raise
        if isinstance(error, pickle.UnpicklingError) and (found := _FORBIDDEN.search(str(error))):
            raise CheckpointError(
                f"{path} holds a {found[1]}, and only tensors and plain values are read: a checkpoint runs no code. "
                "It was not written by murmura, so ask where it comes from"
            ) from None
        raise CheckpointError(_damaged(path)) from error
    if not isinstance(tree, dict):
        raise CheckpointError(_damaged(path))
    return tree


def _damaged(path: Path) -> str:
    return f"{path} is damaged: it was cut short or overwritten, or murmura has not written it. Load another checkpoint"


def _forbidden(error: pickle.UnpicklingError) -> str:
    """Return the class that `torch.load` refused to create."""
    found = _FORBIDDEN.search(str(error))
    return f"a {found[1]}" if found else "an object"


def verify_checksum(path: Path, wanted: Checksum) -> None:
    """Raise `CheckpointError` unless `path` holds exactly the bytes that were written."""
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    if num_bytes != wanted.num_bytes:
        raise CheckpointError(f"{path} has {num_bytes} bytes, and {wanted.num_bytes} were written")
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
    if found.hexdigest() != wanted.sha256:
        raise CheckpointError(f"{path} has other contents than were written: its SHA-256 is {found.hexdigest()}")


def write_text(path: Path, text: str) -> None:
    """Write `text` to disk."""
    with _naming(path), open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync new and changed names in the folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path, what: str) -> None:
    """Make `folder` and check that files can be written and read in it.

    A `ConfigError` begins with `what`, such as "checkpoints cannot be written to", and the name of the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.listdir(folder)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:  # without a name, so that a kill leaves none
            file.write(b"murmura")
            os.fsync(file.fileno())
            file.seek(0)
            file.read()
    except OSError as error:
        raise ConfigError(
            f"{what} {folder}: {describe(error)}. Give a folder that this process may read and write, on a disk with "
            "free space, or one that does not exist yet."
        ) from error


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file name to an OSError: that of a full disk has none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def describe(error: BaseException) -> str:
    """Return the message of `error` without its error number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__
