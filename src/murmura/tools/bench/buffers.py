"""How many buffers are used in turn, so that each comes from memory and not from a cache, as a gradient does."""

from __future__ import annotations

import math
from collections.abc import Iterable

ELEMENT_BYTES = 4  # float32
POOL_BYTES = 96 * 2**20  # more than the caches hold
POOL_BUFFERS = (2, 64)
BATCH_BYTES = 16 * 2**20
BATCH_OPERATIONS = 64


def num_buffers(size_bytes: int) -> int:
    """How many buffers of a size are used in turn."""
    fewest, most = POOL_BUFFERS
    return max(fewest, min(most, math.ceil(POOL_BYTES / size_bytes)))


def most_per_batch(size_bytes: int) -> int:
    """How many operations of a size are timed together at most; each on its own buffer."""
    return max(1, min(BATCH_OPERATIONS, BATCH_BYTES // size_bytes, num_buffers(size_bytes)))


def size_faults(sizes_bytes: Iterable[int], dtype: str = "float32", element_bytes: int = ELEMENT_BYTES) -> list[str]:
    """What is wrong with the sizes of tensors."""
    return [
        f"{size} bytes are no whole number of {dtype} elements. Take a multiple of {element_bytes}, at least that."
        for size in sizes_bytes
        if size < element_bytes or size % element_bytes
    ]
