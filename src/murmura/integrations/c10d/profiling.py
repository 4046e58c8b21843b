"""Events of the calls in torch.profiler, under the names that calls have on every backend: "c10d::allreduce_".

torch makes them for backends written in C++; they last as long as the call, those of messages until ``wait`` ends.
The operation has an event of its own, as on Gloo: "murmura:all_reduce". The transport makes it where the call runs the
operation; where the operation is queued, it lasts from the call to its end, whoever waits for it and in whatever way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from murmura.integrations.c10d.work import Operation
from murmura.transports import profiling

NAMES = {
    "all_reduce": "allreduce_", "reduce": "reduce_", "broadcast": "broadcast_", "barrier": "barrier",
    "all_gather": "allgather_", "_allgather_base": "_allgather_base_", "reduce_scatter": "reduce_scatter_",
    "_reduce_scatter_base": "_reduce_scatter_base_", "gather": "gather_", "scatter": "scatter_",
    "all_to_all": "alltoall_", "send": "send", "recv": "recv_", "recvAnySource": "recv_any_source_",
}  # fmt: skip

_OPERATIONS = {"_allgather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}  # those of other names

is_on: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler runs in this thread."""


def begin(name: str, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Begin an event; the function that comes back ends it."""
    make: Any = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    if make is None:
        return lambda: None
    event = make(f"c10d::{NAMES[name]}", list(tensors), {})
    event.__enter__()
    return lambda: event.__exit__(None, None, None)


def until_done(name: str, operation: Operation) -> Operation:
    """Begin the event of an operation that will run later; return the operation, which ends it."""

    def run(limit: float | None) -> None:
        if not is_on():
            operation(limit)
            return
        torch.autograd._enable_record_function(False)  # type: ignore[attr-defined]  # or the transport shows it again
        try:
            operation(limit)
        finally:
            torch.autograd._enable_record_function(True)  # type: ignore[attr-defined]

    return profiling.until_done(_OPERATIONS.get(name, name), run)
