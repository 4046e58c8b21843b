"""One job at a time writes into a checkpoint folder: a kernel lock on a file in it, which a killed job cannot leave.

Rank 0 takes the lock at its first save and holds it as long as its `Checkpointer` lives, also between saves: two jobs
that took turns would mix their histories. Reading needs no lock.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
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
# What flock answers where it does not exist: Lustre mounted without -o flock, NFS without a lock daemon, some FUSE.
_UNSUPPORTED = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_MAX_TEXT_BYTES = 4096

# The kernel's lock belongs to a process, and so does this table: several Checkpointers of one process share a lock.
_held: weakref.WeakValueDictionary[Path, _Held] = weakref.WeakValueDictionary()
_table = threading.Lock()


class FolderLock:
    """The right of this process to write into `folder`; taken at the first `writing`, given back with the object."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shared: _Held | None = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Write alone; a `CheckpointError` names the job that writes there, or says that this process does already."""
        if self._shared is None or self._shared.pid != os.getpid():
            self._shared = _take(self._folder.resolve() / FILE)
        if not self._shared.turn.acquire(blocking=False):
            raise CheckpointError("another world of this process is saving into the folder. Give each world its own")
        try:
            yield
        finally:
            self._shared.turn.release()


class _Held:
    """A lock that this process holds, until nobody refers to it."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.pid = os.getpid()
        self.descriptor = descriptor
        self.turn = threading.Lock()  # flock tells processes apart, not threads
        if descriptor is not None:
            weakref.finalize(self, _release, path, descriptor, self.pid)


def _take(path: Path) -> _Held:
    _close_in_forks()
    with _table:
        held = _held.get(path)
        if held is None or held.pid != os.getpid():
            held = _held[path] = _Held(path, _lock(path))
        return held


def _lock(path: Path) -> int | None:
    """An open and locked file at `path`; None if locks do not exist here, which is said in the log."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "this system has no flock")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(path, descriptor):  # whoever held it removed it while we waited for the answer
                os.close(descriptor)
                continue
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(_own_words()).encode(), 0)
            return descriptor
        except BlockingIOError:
            words = _words_of(os.pread(descriptor, _MAX_TEXT_BYTES, 0))
            os.close(descriptor)
            raise CheckpointError(
                f"another job writes into this folder: {words}. Give each job a folder of its own, or end that one"
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


def _release(path: Path, descriptor: int, pid: int) -> None:
    if pid != os.getpid():  # a fork: the lock is its parent's
        return
    with contextlib.suppress(OSError):  # a folder that was removed, for one
        if _is_at(path, descriptor):
            os.remove(path)  # while it is locked, so that it is nobody else's
    os.close(descriptor)


@functools.cache
def _close_in_forks() -> None:
    """A fork, a data loader's worker for one, inherits the open file and would hold the lock of a killed parent."""

    def close() -> None:
        for held in list(_held.values()):
            if held.descriptor is not None:
                os.close(held.descriptor)
                held.descriptor = None
        _held.clear()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close)


def _own_words() -> dict[str, Any]:
    try:
        job = DistributedConfig.from_env().job_id
    except ConfigError:  # a job started in another way than by environment variables
        job = None
    return {"host": platform.node(), "pid": os.getpid(), "job": job}


def _words_of(text: bytes) -> str:
    try:
        told = json.loads(text)
        job = f"job {told['job']}" if told["job"] else "without a job id"
        return f"process {told['pid']} on {told['host']}, {job}"
    except (ValueError, TypeError, KeyError):  # it has only just begun, or is no job of ours
        return "it has not said which"
