"""Events of the calls in torch.profiler, under the names that calls have on every backend: "c10d::allreduce_".

torch makes them for backends written in C++. Inside, the transport shows its own, as Gloo does: "murmura:all_reduce".
An event lasts from the call until the result is there for the caller: the end of the call, or of ``wait``. It begins
and ends in the caller's thread, because torch's profiler is a matter of threads, and lends itself to no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NAMES = {
    "all_reduce": "allreduce_", "reduce": "reduce_", "broadcast": "broadcast_", "barrier": "barrier",
    "all_gather": "allgather_", "_allgather_base": "_allgather_base_", "reduce_scatter": "reduce_scatter_",
    "_reduce_scatter_base": "_reduce_scatter_base_", "gather": "gather_", "scatter": "scatter_",
    "all_to_all": "alltoall_", "send": "send", "recv": "recv_", "recvAnySource": "recv_any_source_",
}  # fmt: skip


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
