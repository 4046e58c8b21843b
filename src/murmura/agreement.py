"""Whether all ranks hold the same text, on any transport.

One small all-reduce of digests tells every rank whether the texts are equal. Only if they are not, the texts themselves
are gathered, so that every rank can raise an error that shows the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from murmura.transports.base import Transport
from murmura.transports.objects import all_gather_bytes
from murmura.types import ReduceOp

_LOWEST = torch.iinfo(torch.int64).min  # changes no maximum


def texts_if_different(transport: Transport, lines: Sequence[str], *, abstains: bool = False) -> list[list[str]] | None:
    """Return None if all ranks hold the same `lines`, and otherwise those of every rank, in rank order. Collective.

    A rank that `abstains` takes part, is not compared, and has no lines.
    """
    data = b"" if abstains else "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
    # The greatest of ~x belongs to the least x: if that is the greatest x too, all are equal.
    extremes = torch.tensor([_LOWEST, _LOWEST] if abstains else [digest, ~digest])
    transport.all_reduce(extremes, ReduceOp.MAX)
    greatest, complement = extremes.tolist()
    if greatest == ~complement:
        return None
    return [each.decode().split("\n") if each else [] for each in all_gather_bytes(transport, data)]


def first_difference(texts: Sequence[Sequence[str]], start: int = 0) -> int | None:
    """Return the index, from `start`, of the first line that is not the same in all `texts`; None if all are."""
    longest = max(map(len, texts), default=0)
    return next((row for row in range(start, longest) if len({tuple(text[row : row + 1]) for text in texts}) > 1), None)
