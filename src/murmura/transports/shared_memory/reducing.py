"""All-reduce and broadcast through the shared segment.

Small messages are copied through slots. Large ones in memory from `allocate` are reduced where they lie; any other
goes through its rank's staging area: in a pipeline of pieces between two ranks, in blocks between more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from murmura.collectives.chunks import PIECE_BYTES, chunk_bounds, is_small, plan_segments
from murmura.collectives.direct import push
from murmura.collectives.reduction import Reduction
from murmura.transports.shared_memory.board import PIECES, PLACE_IN, PLACE_OUT, slot_bytes
from murmura.transports.shared_memory.meeting import STAGING_BYTES, Meeting

PIECES_AHEAD = 2


def all_reduce(meeting: Meeting, flat_in: Tensor, flat_out: Tensor, reduction: Reduction, call: str) -> None:
    """Reduce `flat_in` over all ranks into `flat_out`, which may be the same."""
    if is_small(flat_in.nbytes, meeting.world_size):
        _reduce_slots(meeting, flat_in, flat_out, reduction, call)
        return
    place_in, place_out = meeting.segment.place_of(flat_in), meeting.segment.place_of(flat_out)
    if place_in < 0 or place_out < 0:
        place_in = place_out = ~meeting.stage(flat_in.nbytes)
    meeting.enter(call, place_in, place_out)
    inputs, outputs = meeting.places(PLACE_IN), meeting.places(PLACE_OUT)
    if all(place >= 0 for place in inputs):
        _reduce_in_place(meeting, flat_in, reduction, inputs, outputs)
    elif meeting.world_size == 2 and all(place < 0 for place in inputs):
        _reduce_in_pipeline(meeting, flat_in, flat_out, reduction, inputs)
    else:
        _reduce_in_blocks(meeting, flat_in, flat_out, reduction, inputs, outputs)


def _reduce_slots(meeting: Meeting, flat_in: Tensor, flat_out: Tensor, reduction: Reduction, call: str) -> None:
    slots = meeting.board.slots[meeting.number & 1]
    inputs = [meeting.segment.tensor(place, flat_in.numel(), flat_in.dtype) for place in slots]
    inputs[meeting.rank].copy_(flat_in)
    meeting.enter(call)
    reduction.reduce([reduction.array(each) for each in inputs], reduction.array(flat_out))


def _reduce_in_place(
    meeting: Meeting, like: Tensor, reduction: Reduction, inputs: Sequence[int], outputs: Sequence[int]
) -> None:
    """Everything lies in the segment: each rank reduces its chunk."""

    def arrays(places: Sequence[int]) -> list[Any]:
        return [reduction.array(meeting.segment.tensor(place, like.numel(), like.dtype)) for place in places]

    sources = arrays(inputs)
    targets = sources if inputs == outputs else arrays(outputs)
    start, stop = chunk_bounds(like.numel(), meeting.world_size, meeting.rank)
    segments = plan_segments(like.numel(), like.element_size(), meeting.world_size, start, stop)
    push(sources, targets, meeting.rank, segments, reduction)
    meeting.sync()


def _reduce_in_pipeline(
    meeting: Meeting, flat_in: Tensor, flat_out: Tensor, reduction: Reduction, places: Sequence[int]
) -> None:
    """Two ranks: each stages its pieces in order and adds the other's as they come."""
    peer = 1 - meeting.rank
    numel, dtype = flat_in.numel(), flat_in.dtype
    size = min(numel, STAGING_BYTES // dtype.itemsize)
    own_in, own_out = reduction.array(flat_in), reduction.array(flat_out)
    ours, theirs = (
        reduction.array(meeting.segment.tensor(~places[rank], size, dtype)) for rank in (meeting.rank, peer)
    )
    tag = meeting.number << 24
    num_staged = num_added = 0
    for low in range(0, numel, size):
        if low:
            meeting.sync()  # the staging areas start anew
        high = min(low + size, numel)
        pieces = plan_segments(numel, dtype.itemsize, 2, low, high)
        for turn in range(len(pieces) + PIECES_AHEAD):
            if turn < len(pieces):
                start, stop, _ = pieces[turn]
                ours[start - low : stop - low] = own_in[start:stop]
                num_staged += 1
                meeting.board.publish(PIECES, tag | num_staged)
            if turn >= PIECES_AHEAD:
                start, stop, first = pieces[turn - PIECES_AHEAD]
                num_added += 1
                meeting.await_word(peer, PIECES, tag | num_added)
                parts = (own_in[start:stop], theirs[start - low : stop - low])
                reduction.reduce(parts if first == meeting.rank else parts[::-1], own_out[start:stop])


def _reduce_in_blocks(
    meeting: Meeting,
    flat_in: Tensor,
    flat_out: Tensor,
    reduction: Reduction,
    inputs: Sequence[int],
    outputs: Sequence[int],
) -> None:
    """Ranks whose buffer is elsewhere bring it to their staging area, block by block; there it is reduced."""
    numel, dtype = flat_in.numel(), flat_in.dtype
    size = STAGING_BYTES // dtype.itemsize
    staged = inputs[meeting.rank] < 0

    def arrays(places: Sequence[int], low: int, high: int) -> list[Any]:
        starts = [~place if place < 0 else place + low * dtype.itemsize for place in places]
        return [reduction.array(meeting.segment.tensor(start, high - low, dtype)) for start in starts]

    for low in range(0, numel, size):
        high = min(low + size, numel)
        staging = meeting.segment.tensor(~inputs[meeting.rank], high - low, dtype) if staged else None
        if staging is not None:
            staging.copy_(flat_in[low:high])
        meeting.sync()
        start, stop = chunk_bounds(high - low, meeting.world_size, meeting.rank)
        segments = plan_segments(numel, dtype.itemsize, meeting.world_size, low + start, low + stop)
        shifted = [segment._replace(start=segment.start - low, stop=segment.stop - low) for segment in segments]
        push(arrays(inputs, low, high), arrays(outputs, low, high), meeting.rank, shifted, reduction)
        meeting.sync()
        if staging is not None:
            flat_out[low:high].copy_(staging)


def broadcast(meeting: Meeting, raw: Tensor, src: int, call: str) -> None:
    """Copy rank `src`'s bytes to every rank."""
    segment = meeting.segment
    if raw.numel() <= slot_bytes(meeting.world_size):
        slot = segment.tensor(meeting.board.slots[meeting.number & 1][src], raw.numel(), torch.uint8)
        if meeting.rank == src:
            slot.copy_(raw)
        meeting.enter(call)
        if meeting.rank != src:
            raw.copy_(slot)
        return
    place = 0
    if meeting.rank == src:
        place = segment.place_of(raw)
        place = ~meeting.stage(raw.numel()) if place < 0 else place
    meeting.enter(call, place)
    place = meeting.places(PLACE_IN)[src]
    if place < 0:
        _broadcast_in_pipeline(meeting, raw, src, ~place)
    elif meeting.rank != src:
        raw.copy_(segment.tensor(place, raw.numel(), torch.uint8))
    meeting.sync()


def _broadcast_in_pipeline(meeting: Meeting, raw: Tensor, src: int, place: int) -> None:
    """Rank `src` stages its pieces in order; the others copy them as they come."""
    tag = meeting.number << 24
    num_pieces = 0
    for low in range(0, raw.numel(), STAGING_BYTES):
        if low:
            meeting.sync()  # the staging area starts anew
        high = min(low + STAGING_BYTES, raw.numel())
        for start in range(low, high, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, high)
            piece = meeting.segment.tensor(place + start - low, stop - start, torch.uint8)
            num_pieces += 1
            if meeting.rank == src:
                piece.copy_(raw[start:stop])
                meeting.board.publish(PIECES, tag | num_pieces)
            else:
                meeting.await_word(src, PIECES, tag | num_pieces)
                raw[start:stop].copy_(piece)
