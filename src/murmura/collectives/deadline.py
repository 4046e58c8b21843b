"""Deadline: how long the waits of one operation may still last, together."""

from __future__ import annotations

import math
import time


class Deadline:
    """The end of an operation's time, `timeout` seconds from now; None means that there is no limit."""

    def __init__(self, timeout: float | None) -> None:
        self.timeout = math.inf if timeout is None else timeout
        self._began = time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the operation began."""
        return time.monotonic() - self._began

    @property
    def remaining(self) -> float:
        """Seconds until the deadline; not positive after it."""
        return self.timeout - self.waited

    def left(self) -> float | None:
        """The timeout of the next part of the operation: at least a millisecond, None if there is no limit."""
        return None if self.timeout == math.inf else max(0.001, self.remaining)
