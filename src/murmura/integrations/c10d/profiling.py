"""Events of the operations in torch.profiler, under the names of a backend: "murmura:all_reduce"."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from murmura.integrations.c10d.callback_threads import callback_threads


def is_on() -> bool:
    """Whether a profiler runs."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def begin(name: str, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Begin an event; the function that comes back ends it, in whichever thread."""
    make: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    if make is None:
        return lambda: None
    event = make(name, list(tensors), {})
    event.__enter__()
    return lambda: event.__exit__(None, None, None)


def ending_elsewhere(end: Callable[[], None]) -> Callable[[], None]:
    """`end`, called in another thread while this one waits: torch then takes the event for an asynchronous one."""

    def run() -> None:
        ended = threading.Event()

        def end_there() -> None:
            end()
            ended.set()

        callback_threads.run(end_there)
        ended.wait(1.0)

    return run
