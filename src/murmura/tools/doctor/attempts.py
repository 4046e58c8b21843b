"""Doing a thing that may fail or never end, and getting an answer in any case."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """How it went: with a value, or with a fault; `seconds` is how long it took."""

    value: T | None
    fault: BaseException | None
    seconds: float


def attempt(fn: Callable[[], T], seconds: float) -> Attempt[T]:
    """Call `fn` in a thread of its own and wait at most `seconds` for it.

    A thread cannot be killed: one that is still at it afterwards is left behind, and ends with this process.
    """
    ended: list[Attempt[T]] = []
    began = time.monotonic()

    def run() -> None:
        value, fault = None, None
        try:
            value = fn()
        except BaseException as error:  # carried to whoever asked
            fault = error
        ended.append(Attempt(value, fault, time.monotonic() - began))

    thread = threading.Thread(target=run, name="murmura-attempt", daemon=True)
    thread.start()
    thread.join(seconds)
    if ended:
        return ended[0]
    return Attempt(None, TimeoutError(f"there was no answer within {seconds:g} s"), seconds)


def in_words(fault: BaseException, max_chars: int = 400) -> str:
    """A fault in one line that is not too long."""
    text = " ".join(f"{type(fault).__name__}: {fault}".split())
    return text if len(text) <= max_chars else text[:max_chars].rstrip() + " ..."
