"""Operations as events of torch.profiler, named murmura:all_reduce and so on.

torch.profiler sees the threads that ran when it was started through what they carry with them, and a communication
thread carries nothing. So an event is opened where an operation is called or queued, and ended where it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import record_function

is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler records the calling thread."""


def event(name: str) -> contextlib.AbstractContextManager[Any]:
    """An event that lasts as long as the context, in the calling thread."""
    return record_function(f"murmura:{name}")


def until_done(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Open an event now; return `work`, which ends the event when it has run, in whatever thread."""
    opened = record_function(f"murmura:{name}")
    opened.__enter__()  # type: ignore[no-untyped-call]
    ended: torch.futures.Future[None] = torch.futures.Future()
    opened._call_end_callbacks_on_future(ended)

    def run(*args: Any) -> Any:
        try:
            return work(*args)
        finally:
            ended.set_result(None)

    return run
