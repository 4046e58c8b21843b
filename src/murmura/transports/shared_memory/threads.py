"""How many of torch's intra-op threads share the work on a large message.

In the main thread, which computes nothing meanwhile, they are those that torch has there, and never more than this
rank's share of the cores. A communication thread works alone: torch would give it threads of its own, which would
compete with those of the backward that runs beside it.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from murmura.collectives.chunks import PIECE_BYTES

THREAD_BYTES = 2 * PIECE_BYTES
"""What each of several threads gets at a time: more than one alone, because they meet after every piece."""

GRAIN = 32768
"""Elements. torch gives no thread fewer, so an operation on n times as many occupies n threads at most."""


def num_threads(num_ranks: int) -> int:
    """The threads of the main thread of one of `num_ranks` ranks on this host."""
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) // num_ranks))


def piece_bytes(threads: int, item_bytes: int) -> int:
    """The length of a piece on which torch occupies at most so many threads, each with what its cache holds."""
    if torch.get_num_threads() > threads:
        return threads * min(PIECE_BYTES, GRAIN * item_bytes)
    return PIECE_BYTES if threads == 1 else threads * THREAD_BYTES


def copy(target: Tensor, source: Tensor, threads: int) -> None:
    """Copy bytes with at most so many threads."""
    if threads == 1:
        target.numpy()[:] = source.numpy()
        return
    piece = piece_bytes(threads, 1)
    for start in range(0, target.numel(), piece):
        target[start : start + piece].copy_(source[start : start + piece])
