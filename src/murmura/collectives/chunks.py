"""Who reduces what, and in which order: pure functions that every all-reduce of the library follows.

A `flat` buffer of D elements over n ranks has n chunks; chunk i has D // n + (i < D % n) elements. A small buffer
is summed in rank order, x_0 + x_1 + …; in a large one chunk i is summed x_i + x_{i+1} + … (mod n), which is the
order in which a ring that starts chunk i at rank i meets the ranks. The order depends on n and D alone: that is
what makes a ring over a network and direct sums in shared memory agree to the bit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

SMALL_BYTES = 256 * 1024
"""Up to (n - 1) x bytes of this many, every rank takes all inputs at once: latency counts, not bandwidth."""

PIECE_BYTES = 256 * 1024
"""What is reduced or copied at a time, so that it stays in a core's cache between two uses."""


class Segment(NamedTuple):
    """Elements [start, stop) of a flat buffer, summed over the ranks beginning with rank `first`."""

    start: int
    stop: int
    first: int


def is_small(num_bytes: int, world_size: int) -> bool:
    """Whether a buffer is summed in rank order after one exchange, rather than chunk by chunk."""
    return (world_size - 1) * num_bytes <= SMALL_BYTES


def chunk_bounds(numel: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Where chunk `index` of `numel` elements starts and stops; earlier chunks take the remainder."""
    base, extra = divmod(numel, num_chunks)
    start = index * base + min(index, extra)
    return start, start + base + (index < extra)


@functools.lru_cache(maxsize=256)
def plan_segments(
    numel: int, item_bytes: int, world_size: int, start: int, stop: int, piece_bytes: int = PIECE_BYTES
) -> tuple[Segment, ...]:
    """Cut elements [start, stop) of a flat buffer of `numel` into segments of one order each, at most a piece long."""
    step = max(1, piece_bytes // item_bytes)
    rank_order = is_small(numel * item_bytes, world_size)
    segments: list[Segment] = []
    for chunk in range(1 if rank_order else world_size):
        lower, upper = (0, numel) if rank_order else chunk_bounds(numel, world_size, chunk)
        lower, upper = max(lower, start), min(upper, stop)
        segments += [Segment(at, min(at + step, upper), chunk) for at in range(lower, upper, step)]
    return tuple(segments)
