"""Events of the operations in torch.profiler, under the names of a backend: "murmura:all_reduce".

An event lasts from the call until the result is there for the caller: the end of the call, or of ``wait``. It begins
and ends in the caller's thread, because torch's profiler is a matter of threads, and lends itself to no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_on() -> bool:
    """Whether a profiler runs in this thread."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def begin(name: str, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Begin an event; the function that comes back ends it."""
    make: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    if make is None:
        return lambda: None
    event = make(name, list(tensors), {})
    event.__enter__()
    return lambda: event.__exit__(None, None, None)
