"""A lock lets only one job write into a checkpoint folder; the kernel releases it when the job is killed.

Rank 0 takes the lock, on a file in the folder, at its first save and holds it as long as its `Checkpointer` lives, also
between saves: two jobs in turn would mix their checkpoints. Reading needs no lock.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import multiprocessing.util
import os
import platform
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from murmura.config import DistributedConfig
from murmura.errors import CheckpointError, ConfigError

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("murmura")

FILE = ".lock"
# Errors where flock is not supported: Lustre mounted without -o flock, NFS without a lock daemon, some FUSE.
_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_MAX_TEXT_BYTES = 4096

# flock excludes other processes only, so the Checkpointers of this process share the locks in this table.
_held: weakref.WeakValueDictionary[Path, _HeldLock] = weakref.WeakValueDictionary()
_table = threading.Lock()


class FolderLock:
    """The lock of `folder`: acquired at the first `writing`, released when this object is collected."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shared: _HeldLock | None = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock while writing; a `CheckpointError` says which job, or that this process, holds it already."""
        if self._shared is None or self._shared.pid != os.getpid():
            self._shared = _take(self._folder.resolve() / FILE)
        if not self._shared.turn.acquire(blocking=False):
            raise CheckpointError("another world of this process is saving into the folder. Give each world its own")
        try:
            yield
        finally:
            self._shared.turn.release()


class _HeldLock:
    """A lock that this process holds as long as this object is referenced."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.pid = os.getpid()
        self.descriptor = descriptor
        self.turn = threading.Lock()  # flock does not exclude other threads
        if descriptor is not None:
            # Unlike weakref.finalize, it also runs at the end of a child of multiprocessing, and not in forks.
            multiprocessing.util.Finalize(self, _release, (path, descriptor), exitpriority=0)


def _take(path: Path) -> _HeldLock:
    _close_in_forks()
    with _table:
        held = _held.get(path)
        if held is None or held.pid != os.getpid():
            held = _held[path] = _HeldLock(path, _lock(path))
        return held


def _lock(path: Path) -> int | None:
    """Open and lock the file at `path` and return its descriptor; None, with a warning, if locks are not supported."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "this system has no flock")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(path, descriptor):  # its holder removed the file meanwhile
                os.close(descriptor)
                continue
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_own_identity()).encode(), 0)
            return descriptor
        except BlockingIOError:
            holder = _describe_holder(os.pread(descriptor, _MAX_TEXT_BYTES, 0))
            os.close(descriptor)
            raise CheckpointError(
                f"another job writes into this folder: {holder}. Give each job a folder of its own, or end that one"
            ) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _UNSUPPORTED:
                raise
            log.warning(
                "%s cannot be locked (%s): nothing keeps a second job from saving into it, so see to it that none does",
                *(path.parent, error.strerror),
            )
            with contextlib.suppress(OSError):
                os.remove(path)
            return None


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the folder may have been removed
        if _is_at(path, descriptor):
            os.remove(path)  # while it is locked: nobody else can hold it
    os.close(descriptor)


@functools.cache
def _close_in_forks() -> None:
    """Close the files in forks, such as a data loader's workers: they would hold the lock of a killed parent."""

    def close() -> None:
        for held in list(_held.values()):
            if held.descriptor is not None:
                os.close(held.descriptor)
                held.descriptor = None
        _held.clear()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close)


def _own_identity() -> dict[str, Any]:
    try:
        job = DistributedConfig.from_env().job_id
    except ConfigError:  # the job was not started by environment variables
        job = None
    return {"host": platform.node(), "pid": os.getpid(), "job": job}


def _describe_holder(text: bytes) -> str:
    try:
        holder = json.loads(text)
        job = f"job {holder['job']}" if holder["job"] else "without a job id"
        return f"process {holder['pid']} on {holder['host']}, {job}"
    except (ValueError, TypeError, KeyError):  # not written yet, or not by murmura
        return "it has not said which"
