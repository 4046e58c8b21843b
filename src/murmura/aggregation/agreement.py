"""Before anything is exchanged the ranks compare what they are about to exchange, on any transport.

One small all-reduce of a digest tells all of them whether they agree. Only if not, they tell each other in words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from murmura.aggregation.layout import Slot, from_bytes, to_bytes
from murmura.config import DistributedConfig
from murmura.transports.base import Transport
from murmura.transports.failures import mismatch
from murmura.types import DistributedBackend, ReduceOp, TransportKind

_LOWEST = torch.iinfo(torch.int64).min  # of no weight in a maximum


def control_device(config: DistributedConfig, tensors: Sequence[Tensor]) -> torch.device:
    """Where to put what goes along with `tensors`: NCCL moves nothing that is not on a GPU."""
    if tensors:
        return tensors[0].device
    on_gpu = config.backend is DistributedBackend.CUDA or config.transport is TransportKind.NCCL
    return torch.device("cuda" if on_gpu else "cpu")


def agree(
    transport: Transport, call: str, layout: Sequence[Slot], device: torch.device, *, is_silent: bool = False
) -> None:
    """Raise `CollectiveMismatch` on every rank, and poison the transport, if the ranks brought different layouts.

    A rank that `is_silent` takes part but has no say.
    """
    text = "" if is_silent else "\n".join([call, *map(str, layout)])
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    # The greatest of ~x belongs to the least x: if that is the greatest x too, all are equal.
    votes = torch.tensor([_LOWEST, _LOWEST] if is_silent else [digest, ~digest], device=device)
    transport.all_reduce(votes, ReduceOp.MAX)
    greatest, complement = votes.tolist()
    if greatest == ~complement:
        return
    texts = transport.all_gather(to_bytes(text, device))
    assert isinstance(texts, list)
    lines = tell_apart([from_bytes(each) for each in texts])
    ranks = transport.world_ranks
    error = mismatch(ranks[transport.rank], call, dict(zip(ranks, lines, strict=True)))
    transport.abort(error)
    raise error


def tell_apart(texts: Sequence[str]) -> list[str]:
    """Each rank's text in a line: its call, how many tensors, and the first tensor that is not the same everywhere."""
    spoken = [text.split("\n") for text in texts if text]
    longest = max(map(len, spoken), default=0)
    differing = [row for row in range(1, longest) if len({str(rows[row : row + 1]) for rows in spoken}) > 1]
    return [_in_a_line(text, differing[:1]) if text else "an empty list, which suits any" for text in texts]


def _in_a_line(text: str, differing: Sequence[int]) -> str:
    rows = text.split("\n")
    line = f"{rows[0]} of {len(rows) - 1} tensor{'s' * (len(rows) != 2)}"
    for row in differing:
        line += f"; [{row - 1}] is {rows[row]}" if row < len(rows) else f"; there is no [{row - 1}]"
    return line
