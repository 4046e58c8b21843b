"""WatchedStore: a store in which torch can wait for a rank that will never come, and is told so.

Torch's own waits end at their time-out alone, and hold the connection to the server until then, so that nothing else
of this process reaches the store.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from murmura.transports.bounded_store import StoreSilent

Watch: TypeAlias = Callable[[], Exception | None]
"""Looks whether a rank that is waited for has died or failed; returns the error to raise."""

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.02  # seconds between two looks
FINISH_SECONDS = 0.5  # for work that cannot be interrupted to end by itself
_Base: Any = dist.Store  # type: ignore[attr-defined]


def nobody() -> None:
    """A watch that finds nothing."""
    return


def poll(is_over: Callable[[], bool], seconds: float, watch: Watch) -> bool:
    """Look again and again until `is_over`, or for `seconds`; whether it is. Raises what `watch` finds."""
    deadline = time.monotonic() + seconds
    pause = FIRST_PAUSE
    while not is_over():
        error = watch()
        if error is not None:
            if is_over():  # by what was said between the two looks
                return True
            raise error
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))  # a store has no wait that can be interrupted
        pause = min(2 * pause, LONGEST_PAUSE)
    return True


T = TypeVar("T")


def run_watched(work: Callable[[], T], seconds: float, watch: Watch) -> T:
    """What `work` returns or raises; TimeoutError after `seconds`, or at once what `watch` finds.

    `work` cannot be interrupted, so it may then go on in a thread of its own, which the end of this process ends. What
    `watch` finds is raised a little later if `work` does not end: peers that live still answer it, and if it went on
    without them, or they without it, each would wait for the other until its time is up.
    """
    if (error := watch()) is not None:
        raise error
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # carried to the caller
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, name="murmura-rendezvous", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while not ended.wait(min(LONGEST_PAUSE, max(0.0, deadline - time.monotonic()))):
        if (error := watch()) is not None:
            ended.wait(FINISH_SECONDS)
            raise error
        if time.monotonic() >= deadline:
            raise TimeoutError(f"it took more than {seconds:.1f} s.")
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


class WatchedStore(_Base):  # type: ignore[misc]
    """`inner`, in which no wait outlasts `timeout` seconds or the first error that `watch` finds."""

    def __init__(self, inner: Any, timeout: float, watch: Watch) -> None:
        super().__init__()
        self._inner = inner
        self._timeout = timeout
        self.watch = watch

    def release(self) -> None:
        """Let go of the store and of the ranks: a thread that torch does not let end may hold this for a while.

        If it comes back to the store, it ends with an error that nobody hears.
        """
        self._inner, self.watch = None, nobody

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        found: list[bytes] = []

        def look() -> bool:
            with contextlib.suppress(StoreSilent):  # it is slow: asked again, until the time is up
                if self.check([key]):
                    found.append(bytes(self._inner.get(key)))
            return bool(found)

        self._wait_until(look, [key], self._timeout)
        return found[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_until(lambda: self.check(keys), keys, self._timeout if timeout is None else timeout.total_seconds())

    def _wait_until(self, is_over: Callable[[], bool], keys: Sequence[str], seconds: float) -> None:
        if not poll(is_over, seconds, self.watch):
            raise TimeoutError(f"nobody said {', '.join(keys)} in the store for {seconds:.1f} s.")

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._inner.check(list(keys)))

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._inner.compare_set(key, expected, desired))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        return False
