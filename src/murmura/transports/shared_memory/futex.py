"""Three things Python lacks for memory shared between processes: sleep until a word changes, wake, and a fence.

Linux only. The wait releases the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import Any

_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1

ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
"""Whether this processor shows stores, and performs loads, in program order: then data-then-flag needs no fence."""


def is_supported() -> bool:
    """Whether this platform has what shared memory needs: futexes, memfds and abstract sockets, that is Linux."""
    known = sys.platform == "linux" and platform.machine() in _SYSCALL_NUMBERS
    return known and hasattr(os, "memfd_create")


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


@functools.cache
def _syscall() -> tuple[Callable[..., Any], int]:
    return ctypes.CDLL(None, use_errno=True).syscall, _SYSCALL_NUMBERS[platform.machine()]


def wait(address: int, expected: int, seconds: float) -> None:
    """Sleep until woken, or `seconds` have passed; return at once if the 32-bit word at `address` is not `expected`."""
    syscall, number = _syscall()
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    syscall(number, ctypes.c_void_p(address), _FUTEX_WAIT, ctypes.c_uint32(expected), ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake every sleeper on the word at `address`."""
    syscall, number = _syscall()
    syscall(number, ctypes.c_void_p(address), _FUTEX_WAKE, 2**31 - 1, None, None, 0)


class Fence:
    """A full memory fence: releasing and retaking a lock that is held for life (the other way round is not a fence).

    `release` and `acquire` are for the one thread that runs a channel's operations, and have a lock of their own: if
    another thread retook it in between, `acquire` would wait for ever. Calling the fence is for anybody, at any moment:
    it puts up with a lock that an interrupt, or another thread in here, has left open.
    """

    def __init__(self) -> None:
        own, shared = threading.Lock(), threading.Lock()
        own.acquire()
        shared.acquire()
        self.release, self.acquire = own.release, own.acquire
        self._release, self._acquire = shared.release, shared.acquire

    def __call__(self) -> None:
        try:  # noqa: SIM105 (contextlib.suppress takes ten times as long)
            self._release()
        except RuntimeError:
            pass
        self._acquire(False)
