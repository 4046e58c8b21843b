"""All-gather and reduce-scatter of tensors that every rank can read where they lie: nothing is staged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from murmura.collectives.reduction import Reduction
from murmura.transports.shared_memory.peer_memory import SCRATCH_BYTES
from murmura.transports.shared_memory.session import CollectiveSession


def gather_attached(session: CollectiveSession, parts: Sequence[Any], addresses: Sequence[int]) -> None:
    """Fill the bytes `parts[r]` of every peer r from addresses[r] in its process; this rank's part is there."""
    for peer in session.peers:
        session.read_peer(peer, addresses[peer], parts[peer].ctypes.data, len(parts[peer]))
    session.sync()  # nobody reads this rank's tensor any more


def reduce_scatter_attached(
    session: CollectiveSession, out: Tensor, own: Tensor, reduction: Reduction, addresses: Sequence[int]
) -> None:
    """Reduce into `out`, in rank order, this rank's part of what lies at addresses[r] in the process of rank r.

    `own` is that part of this rank's tensor.
    """
    rank, item_bytes = session.rank, out.element_size()
    result, mine = reduction.array(out), reduction.array(own)
    scratch = {peer: session.memory.scratch(peer) for peer in session.peers}
    places = {peer: each.ctypes.data for peer, each in scratch.items()}
    views = {peer: reduction.array(torch.from_numpy(each).view(out.dtype)) for peer, each in scratch.items()}
    step = SCRATCH_BYTES // item_bytes
    for start in range(0, out.numel(), step):
        stop = min(start + step, out.numel())
        for peer in session.peers:
            there = addresses[peer] + rank * out.nbytes + start * item_bytes
            session.read_peer(peer, there, places[peer], (stop - start) * item_bytes)
        inputs = [
            mine[start:stop] if each == rank else views[each][: stop - start] for each in range(session.world_size)
        ]
        session.reduce(reduction, inputs, result[start:stop])
    session.sync()  # nobody reads this rank's tensor any more
