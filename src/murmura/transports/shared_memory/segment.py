"""One nameless piece of memory shared by the processes of a world: an arena per rank, mapped whole by everyone.

The memory belongs to a memfd, which has no name at any moment: when the last process that holds it is gone, however
it went, so is the memory. It is sparse, so an arena as large as the machine's memory costs only what is used of it.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmura.errors import TransportError
from murmura.transports.forks import guard
from murmura.transports.shared_memory.arena import Arena, round_up

_RELEASE_BYTES = 2**20  # freed tensors from this size on give their pages back to the system


def create_memfd(world_size: int) -> int:
    """A sealed memfd with room for `world_size` arenas, readable and writable by this user alone."""
    import fcntl  # systems without it have no shared memory either, but murmura must import there

    arena_bytes = round_up(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    fd = os.memfd_create("murmura", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)  # a memfd is born 0777
        os.ftruncate(fd, world_size * arena_bytes)
        # Nobody can shrink it later, and so nobody can make a peer's access a bus error.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Segment:
    """The mapped memory of a world, seen from `rank`; a *place* is an offset in it.

    Tensors made here keep the mapping alive, so it is never unmapped under one.
    """

    def __init__(self, fd: int, rank: int, world_size: int) -> None:
        self._fd = fd
        total = os.fstat(fd).st_size
        try:
            self._mmap = mmap.mmap(fd, total, mmap.MAP_SHARED)
        except OSError as error:
            raise TransportError(
                f"rank {rank} cannot map {total / 2**30:.0f} GiB of address space ({error.strerror}). "
                "Is there a limit on it? `ulimit -v unlimited` lifts it; the memory itself is used only as needed."
            ) from error
        self.world_size = world_size
        self.arena_bytes = total // world_size
        self._own = rank * self.arena_bytes
        self._arena = Arena(self.arena_bytes)
        self._lock = threading.Lock()  # channels allocate from threads of their own
        self._retired: list[tuple[Callable[[], bool], Sequence[int]]] = []  # of channels that this rank has left
        self.owner = rank  # as errors call it
        self._freed: collections.deque[int] = collections.deque()  # by finalizers that found the lock taken
        self.bytes: Any = np.frombuffer(self._mmap, dtype=np.uint8)
        self.memory = memoryview(self._mmap)
        self.words = self.memory.cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
        self._forked = False
        guard(self)

    def retire(self, is_deserted: Callable[[], bool], places: Sequence[int]) -> None:
        """Free `places` as soon as they are deserted; looked at whenever memory is taken."""
        with self._lock:
            self._retired.append((is_deserted, places))

    def _free_deserted(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, []
            for is_deserted, places in retired:
                if not is_deserted():
                    self._retired.append((is_deserted, places))
                    continue
                for place in places:
                    self._give_back(place)

    def take(self, num_bytes: int) -> int:
        """The place of a new range in this rank's arena, its pages reserved."""
        while self._freed:
            self.give_back(self._freed.popleft())
        if self._retired:
            self._free_deserted()
        with self._lock:
            start = self._arena.take(num_bytes)
        try:
            if start is None:
                raise OSError(errno.ENOMEM, "the arena is full")
            os.posix_fallocate(self._fd, self._own + start, max(num_bytes, 1))
        except OSError as error:
            if start is not None:
                with self._lock:
                    self._arena.give_back(start)
            raise TransportError(
                f"rank {self.owner} cannot have {num_bytes / 2**20:.0f} MiB of shared memory ({error.strerror}). "
                "Use fewer ranks or smaller buffers on this host, or give it more memory.",
                rank=self.owner,
                operation="allocate",
            ) from error
        return self._own + start

    def give_back(self, place: int) -> None:
        """Free a range taken before; a large one returns its pages to the system."""
        with self._lock:
            self._give_back(place)

    def _give_back(self, place: int) -> None:
        if self._forked:
            return
        length = self._arena.give_back(place - self._own)
        if length >= _RELEASE_BYTES:
            self._mmap.madvise(mmap.MADV_REMOVE, place, length)

    def after_fork(self) -> None:
        """In a forked child nothing is freed when a tensor dies: the memory is the parent's."""
        self._forked = True

    def _tensor_freed(self, place: int) -> None:
        """Free a tensor's range, from whatever thread its last view died in; later, if this is not the moment."""
        if self._lock.acquire(False):
            try:
                self._give_back(place)
            finally:
                self._lock.release()
        else:
            self._freed.append(place)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed tensor in this rank's arena; its memory is freed with its last view."""
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        place = self.take(numel * dtype.itemsize)
        raw = self.bytes[place : place + numel * dtype.itemsize]
        weakref.finalize(raw, self._tensor_freed, place).atexit = False
        return torch.from_numpy(raw).view(dtype).zero_()

    def place_of(self, flat: Tensor) -> int:
        """Where a contiguous tensor lies in this rank's arena; -1 if it does not."""
        place = flat.data_ptr() - self.address
        inside = self._own <= place and place + flat.nbytes <= self._own + self.arena_bytes
        return place if inside else -1

    def tensor(self, place: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A view of any rank's memory."""
        return torch.from_numpy(self.bytes[place : place + numel * dtype.itemsize]).view(dtype)

    def close(self) -> None:
        """Let go of the file; the mapping ends with the last tensor in it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._freed.clear()
        self._retired.clear()
