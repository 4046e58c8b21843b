"""Collectives as free functions: over a point-to-point exchange, or over memory that every rank can reach.

Both kinds sum in the same order, so for every dtype but fp16 and bf16 they agree to the bit (see `chunks`).
"""

from murmura.collectives.chunks import SMALL_BYTES, chunk_bounds, is_small
from murmura.collectives.ring import all_reduce, barrier, broadcast

__all__ = ["SMALL_BYTES", "all_reduce", "barrier", "broadcast", "chunk_bounds", "is_small"]
