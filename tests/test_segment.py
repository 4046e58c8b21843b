"""The memory that ranks share: private, never shrunk, and with a word to sleep on."""

from __future__ import annotations

import mmap
import os
import stat
import time
from collections.abc import Iterator

import numpy as np
import pytest

from murmura.transports.shared_memory import futex
from murmura.transports.shared_memory.segment import create_memfd


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_memfd(2)
    yield fd
    os.close(fd)


def test_only_the_user_reads_and_writes_it(fd: int) -> None:
    assert stat.S_IMODE(os.fstat(fd).st_mode) == stat.S_IRUSR | stat.S_IWUSR


def test_nobody_can_resize_it(fd: int) -> None:
    num_bytes = os.fstat(fd).st_size
    for other in (0, num_bytes - 1, num_bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, other)


def test_a_sleep_lasts_until_its_time_is_over(fd: int) -> None:
    """Beyond a second, too, where the time has two parts."""
    word = np.frombuffer(mmap.mmap(fd, mmap.PAGESIZE), dtype=np.uint32)
    for seconds in (0.05, 1.05):
        began = time.monotonic()
        futex.wait(word.ctypes.data, 0, seconds)
        assert time.monotonic() - began >= seconds - 0.01


def test_nobody_sleeps_on_a_word_that_has_changed(fd: int) -> None:
    word = np.frombuffer(mmap.mmap(fd, mmap.PAGESIZE), dtype=np.uint32)
    word[0] = 1
    began = time.monotonic()
    futex.wait(word.ctypes.data, 0, 20.0)
    assert time.monotonic() - began < 10.0
