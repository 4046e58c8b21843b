"""A transport over a process group of torch.distributed: Gloo, NCCL, or any backend registered there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from murmura.errors import not_built

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ProcessGroupTransport:
    """Runs on `process_group`, which stays the caller's.

    `check="always"` compares what the ranks call before each operation, for one round trip; "best_effort"
    finds out who called what after a time-out.
    """

    def __init__(self, process_group: ProcessGroup, *, check: str = "best_effort") -> None:
        not_built("murmura.ProcessGroupTransport")
