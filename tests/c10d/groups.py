"""Ranks in a process group of torch's, on any backend; what runs on them stands at the top level of its module."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from murmura import Transport, run_world
from murmura.transports import rendezvous

SECONDS = 40.0


def run(
    fn: Callable[..., Any], world_size: int, *args: Any, backend: str = "murmura", hosts: Sequence[int] | None = None
) -> list[Any]:
    """What `fn(*args)` returns on each rank of a default process group of `backend`; `hosts` pretends to be several."""
    with tempfile.TemporaryDirectory() as folder:
        options = (fn, f"{folder}/store", backend, hosts, args)
        return run_world(_in_group, world_size, *options, kind="processes", timeout=SECONDS)


def _in_group(
    transport: Transport,
    fn: Callable[..., Any],
    path: str,
    backend: str,
    hosts: Sequence[int] | None,
    args: tuple[Any, ...],
) -> Any:
    if hosts is not None:
        rendezvous.host_identity = lambda: f"host {hosts[transport.rank]}"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "the backend murmura was tried with")  # another version of torch
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames its collectives
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=transport.rank,
        world_size=transport.world_size,
        timeout=timedelta(seconds=SECONDS),
    )
    try:
        return fn(*args)
    finally:
        dist.destroy_process_group()
