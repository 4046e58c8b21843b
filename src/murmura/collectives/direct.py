"""All-reduce over memory that every rank can reach: threads of a process, or a segment shared by processes.

Each rank reduces a share of the buffer, reading every rank's input, and writes the result into every rank's
output (it *pushes*: reading what a peer has just written costs up to four times more than writing to it). An
element is read and written by one rank only, so outputs may be the inputs; the caller synchronises the ranks
before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from murmura.collectives.chunks import Segment
from murmura.collectives.reduction import Reduction


def push(
    inputs: Sequence[Any], outputs: Sequence[Any], own: int, segments: Sequence[Segment], reduction: Reduction
) -> None:
    """Reduce `segments` of the ranks' `inputs` and write them into all `outputs` (arrays, in rank order)."""
    size = len(inputs)
    for start, stop, first in segments:
        parts = [inputs[(first + step) % size][start:stop] for step in range(size)]
        # The result must overlap no input but the first, or one of two.
        target = own if size == 2 else first
        result = outputs[target][start:stop]
        reduction.reduce(parts, result)
        # Every rank begins with another peer, so that they do not all write to one at a time.
        for step in range(1, size):
            outputs[(target + step) % size][start:stop] = result
