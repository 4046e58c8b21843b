"""What a wrapped module holds beyond the bare one: memory of rank processes that do nothing else.

The measure is the proportional set size, in which a page shared by n processes counts as 1/n in each: what all ranks
hold together, divided by their number, also if a process outside the world shares the memory.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from murmura import Transport
from murmura.tools.bench.models import Model
from murmura.tools.bench.steps import Method, prepare

NUM_STEPS = 4  # enough for every buffer that a step ever needs


def measure_memory(
    transport: Transport, method: Callable[[str, Transport, Path], Method], recipe: Model, name: str, folder: Path
) -> float:
    """The bytes that a rank uses for training under contestant `name`, with the gradients of a step alive.

    Every rank returns the mean over all of them. It runs in a process that exists for this alone.
    """
    torch.set_num_threads(1)
    (contestant,) = prepare(transport, [method(name, transport, folder)], recipe)
    for _ in range(NUM_STEPS):
        contestant.differentiate()
        contestant.finish_step()
    contestant.differentiate()
    gc.collect()
    _return_free_memory()
    transport.barrier()  # all are there, so that what is shared is shared by all
    used = torch.tensor([float(psutil.Process().memory_full_info().pss)], dtype=torch.float64)
    transport.barrier()
    transport.all_reduce(used, "mean")
    contestant.close()
    return used.item()


def _return_free_memory() -> None:
    """Let the C library give what is free in its heap back to the system, so that only what is held is counted."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
