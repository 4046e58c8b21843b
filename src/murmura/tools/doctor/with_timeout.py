"""Call a function that may fail or hang, with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class TimedResult(Generic[T]):
    """The value that a call returned, or the exception that it raised, and the seconds it took."""

    value: T | None
    fault: BaseException | None
    seconds: float


def call_with_timeout(fn: Callable[[], T], seconds: float) -> TimedResult[T]:
    """Call `fn` in a new thread and wait at most `seconds` for it.

    A thread cannot be killed: one that still runs afterwards ends with this process.
    """
    ended: list[TimedResult[T]] = []
    began = time.monotonic()

    def run() -> None:
        value, fault = None, None
        try:
            value = fn()
        except BaseException as error:  # returned to the caller
            fault = error
        ended.append(TimedResult(value, fault, time.monotonic() - began))

    thread = threading.Thread(target=run, name="murmura-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if ended:
        return ended[0]
    return TimedResult(None, TimeoutError(f"there was no answer within {seconds:g} s"), seconds)


def one_line(fault: BaseException, max_chars: int = 400) -> str:
    """Return an exception as one line of limited length."""
    text = " ".join(f"{type(fault).__name__}: {fault}".split())
    return text if len(text) <= max_chars else text[:max_chars].rstrip() + " ..."
