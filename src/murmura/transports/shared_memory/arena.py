"""Where things lie in one rank's part of the shared segment: a first-fit allocator, plain arithmetic."""

from __future__ import annotations

PAGE_BYTES = 4096


def round_up(num_bytes: int, unit: int = PAGE_BYTES) -> int:
    return -(-num_bytes // unit) * unit


class Arena:
    """Hands out page-aligned ranges of [0, capacity) and takes them back; neighbouring free ranges merge."""

    def __init__(self, capacity: int) -> None:
        self._free = {0: capacity}  # start: length, in order of start
        self._taken: dict[int, int] = {}

    def take(self, num_bytes: int) -> int | None:
        """The start of a range of at least `num_bytes`, or None if there is none."""
        length = round_up(max(num_bytes, 1))
        for start, free in self._free.items():
            if free >= length:
                del self._free[start]
                if free > length:
                    self._give(start + length, free - length)
                self._taken[start] = length
                return start
        return None

    def give_back(self, start: int) -> int:
        """Free the range that starts at `start`; return its length."""
        length = self._taken.pop(start)
        self._give(start, length)
        return length

    def _give(self, start: int, length: int) -> None:
        ranges: dict[int, int] = {}
        last = -1
        for at, size in sorted([*self._free.items(), (start, length)]):
            if last >= 0 and last + ranges[last] == at:
                ranges[last] += size
            else:
                ranges[at] = size
                last = at
        self._free = ranges
