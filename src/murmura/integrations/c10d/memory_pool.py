"""MemoryPool: tensors in memory that a transport need not copy, used again and again.

New pages are slow: a buffer that FSDP2 asked for in every step would cost more than its collective.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from murmura.transports.base import Transport

KEPT_BYTES = 1 << 30  # of free buffers


class MemoryPool:
    """Hands out tensors of a transport's memory; it is free again when the last view of a tensor is gone."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._free: dict[int, list[Tensor]] = {}
        self._free_bytes = 0
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A one-dimensional tensor; its contents are undefined."""
        num_bytes = numel * dtype.itemsize
        size = -(-max(1, num_bytes) // 4096) * 4096
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else None
            self._free_bytes -= size if buffer is not None else 0
        if buffer is None:
            buffer = self._transport.allocate(size, torch.uint8)
        array = buffer.numpy()[:num_bytes]
        weakref.finalize(array, self._give_back, buffer).atexit = False
        return torch.from_numpy(array).view(dtype)

    def _give_back(self, buffer: Tensor) -> None:
        # The lock may be held by this very thread, if the garbage collector runs here: then the buffer is freed.
        if self._lock.acquire(False):
            try:
                if self._free_bytes + buffer.nbytes <= KEPT_BYTES:
                    self._free.setdefault(buffer.nbytes, []).append(buffer)
                    self._free_bytes += buffer.nbytes
            finally:
                self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._free.clear()
            self._free_bytes = 0
