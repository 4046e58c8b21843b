"""All-reduce through the shared segment.

Small messages are copied through slots. Large ones in memory from `allocate` are reduced where they lie; any other
goes through its rank's staging area: in a pipeline of pieces between two ranks, in blocks between more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from murmura.collectives.chunks import chunk_bounds, is_small, plan_segments
from murmura.collectives.direct import push
from murmura.collectives.reduction import Reduction
from murmura.transports.shared_memory.control_block import PIECES, PLACE_IN, PLACE_OUT
from murmura.transports.shared_memory.session import STAGING_BYTES, CollectiveSession

PIECES_AHEAD = 2


def all_reduce_in_segment(
    session: CollectiveSession, flat_in: Tensor, flat_out: Tensor, reduction: Reduction, call: str
) -> None:
    """Reduce `flat_in` over all ranks into `flat_out`, which may be the same."""
    if is_small(flat_in.nbytes, session.world_size):
        _reduce_slots(session, flat_in, flat_out, reduction, call)
        return
    place_in, place_out = session.segment.place_of(flat_in), session.segment.place_of(flat_out)
    if place_in < 0 or place_out < 0:
        place_in = place_out = ~session.stage(flat_in.nbytes)
    session.enter(call, place_in, place_out)
    inputs, outputs = session.places(PLACE_IN), session.places(PLACE_OUT)
    if all(place >= 0 for place in inputs):
        _reduce_in_place(session, flat_in, reduction, inputs, outputs)
    elif session.world_size == 2 and all(place < 0 for place in inputs):
        _reduce_in_pipeline(session, flat_in, flat_out, reduction, inputs)
    else:
        _reduce_in_blocks(session, flat_in, flat_out, reduction, inputs, outputs)


def _reduce_slots(
    session: CollectiveSession, flat_in: Tensor, flat_out: Tensor, reduction: Reduction, call: str
) -> None:
    slots = session.control.slots[session.number & 1]
    inputs = [session.segment.tensor(place, flat_in.numel(), flat_in.dtype) for place in slots]
    inputs[session.rank].copy_(flat_in)
    session.enter(call)
    reduction.reduce([reduction.array(each) for each in inputs], reduction.array(flat_out))


def _reduce_in_place(
    session: CollectiveSession, like: Tensor, reduction: Reduction, inputs: Sequence[int], outputs: Sequence[int]
) -> None:
    """Everything lies in the segment: each rank reduces its chunk."""

    def arrays(places: Sequence[int]) -> list[Any]:
        return [reduction.array(session.segment.tensor(place, like.numel(), like.dtype)) for place in places]

    sources = arrays(inputs)
    targets = sources if inputs == outputs else arrays(outputs)
    start, stop = chunk_bounds(like.numel(), session.world_size, session.rank)
    segments = plan_segments(like.numel(), like.element_size(), session.world_size, start, stop)
    push(sources, targets, session.rank, segments, reduction)
    session.sync()


def _reduce_in_pipeline(
    session: CollectiveSession, flat_in: Tensor, flat_out: Tensor, reduction: Reduction, places: Sequence[int]
) -> None:
    """Two ranks: each stages its pieces in order and adds the other's as they come."""
    peer = 1 - session.rank
    numel, dtype = flat_in.numel(), flat_in.dtype
    size = min(numel, STAGING_BYTES // dtype.itemsize)
    own_in, own_out = reduction.array(flat_in), reduction.array(flat_out)
    ours, theirs = (
        reduction.array(session.segment.tensor(~places[rank], size, dtype)) for rank in (session.rank, peer)
    )
    tag = session.number << 24
    num_staged = num_added = 0
    for low in range(0, numel, size):
        if low:
            session.sync()  # the staging areas start anew
        high = min(low + size, numel)
        pieces = plan_segments(numel, dtype.itemsize, 2, low, high)
        for turn in range(len(pieces) + PIECES_AHEAD):
            if turn < len(pieces):
                start, stop, _ = pieces[turn]
                ours[start - low : stop - low] = own_in[start:stop]
                num_staged += 1
                session.control.publish(PIECES, tag | num_staged)
            if turn >= PIECES_AHEAD:
                start, stop, first = pieces[turn - PIECES_AHEAD]
                num_added += 1
                session.await_word(peer, PIECES, tag | num_added)
                parts = (own_in[start:stop], theirs[start - low : stop - low])
                reduction.reduce(parts if first == session.rank else parts[::-1], own_out[start:stop])


def _reduce_in_blocks(
    session: CollectiveSession,
    flat_in: Tensor,
    flat_out: Tensor,
    reduction: Reduction,
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> None:
    """Ranks whose buffer is elsewhere bring it to their staging area, block by block; there it is reduced."""
    numel, dtype = flat_in.numel(), flat_in.dtype
    size = STAGING_BYTES // dtype.itemsize
    staged = inputs[session.rank] < 0

    def arrays(places: Sequence[int], low: int, high: int) -> list[Any]:
        starts = [~place if place < 0 else place + low * dtype.itemsize for place in places]
        return [reduction.array(session.segment.tensor(start, high - low, dtype)) for start in starts]

    for low in range(0, numel, size):
        high = min(low + size, numel)
        staging = session.segment.tensor(~inputs[session.rank], high - low, dtype) if staged else None
        if staging is not None:
            staging.copy_(flat_in[low:high])
        session.sync()
        start, stop = chunk_bounds(high - low, session.world_size, session.rank)
        segments = plan_segments(numel, dtype.itemsize, session.world_size, low + start, low + stop)
        shifted = [segment._replace(start=segment.start - low, stop=segment.stop - low) for segment in segments]
        push(arrays(inputs, low, high), arrays(outputs, low, high), session.rank, shifted, reduction)
        session.sync()
        if staging is not None:
            flat_out[low:high].copy_(staging)
