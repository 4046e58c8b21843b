"""All-reduce of tensors that every rank can read where they lie: nothing is staged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from murmura.collectives.chunks import chunk_bounds, plan_segments
from murmura.collectives.reduction import Reduction
from murmura.transports.shared_memory.peer_memory import SCRATCH_BYTES
from murmura.transports.shared_memory.session import CollectiveSession


def reduce_attached(session: CollectiveSession, flat: Tensor, reduction: Reduction, addresses: Sequence[int]) -> None:
    """Reduce `flat`, which lies at addresses[r] in the process of rank r, in place."""
    rank, size, item_bytes = session.rank, session.world_size, flat.element_size()
    peers = session.peers
    own = reduction.array(flat)
    scratch = {peer: session.memory.scratch(peer) for peer in peers}
    places = {peer: each.ctypes.data for peer, each in scratch.items()}
    views = {peer: reduction.array(torch.from_numpy(each).view(flat.dtype)) for peer, each in scratch.items()}
    bounds = [chunk_bounds(flat.numel(), size, chunk) for chunk in range(size)]
    for start, stop, first in plan_segments(flat.numel(), item_bytes, size, *bounds[rank], SCRATCH_BYTES):
        assert first == rank  # so peers come in the order of the sum, and the result may overlap this rank's input
        for peer in peers:
            there = addresses[peer] + start * item_bytes
            session.read_peer(peer, there, places[peer], (stop - start) * item_bytes)
        result = own[start:stop]
        inputs = [result, *(views[peer][: stop - start] for peer in peers)]
        session.reduce(reduction, inputs, result)
    session.sync()
    for peer in peers:
        start, stop = bounds[peer]
        at = start * item_bytes
        session.read_peer(peer, addresses[peer] + at, flat.data_ptr() + at, (stop - start) * item_bytes)
    session.sync()  # a rank that left might write what a peer still reads
