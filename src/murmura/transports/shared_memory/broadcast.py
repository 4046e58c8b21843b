"""Broadcast through the shared segment: by slots, by one copy out of the source's arena, or by a pipeline of pieces."""

from __future__ import annotations

import torch
from torch import Tensor

from murmura.collectives.chunks import PIECE_BYTES
from murmura.transports.shared_memory.control_block import PIECES, PLACE_IN, slot_bytes
from murmura.transports.shared_memory.session import STAGING_BYTES, CollectiveSession
from murmura.transports.shared_memory.threads import copy


def broadcast_in_segment(session: CollectiveSession, raw: Tensor, src: int, call: str) -> None:
    """Copy rank `src`'s bytes to every rank."""
    segment = session.segment
    if raw.numel() <= slot_bytes(session.world_size):
        slot = segment.tensor(session.control.slots[session.number & 1][src], raw.numel(), torch.uint8)
        if session.rank == src:
            slot.copy_(raw)
        session.enter(call)
        if session.rank != src:
            raw.copy_(slot)
        return
    place = 0
    if session.rank == src:
        place = segment.place_of(raw)
        place = ~session.stage(raw.numel()) if place < 0 else place
    session.enter(call, place)
    place = session.places(PLACE_IN)[src]
    if place < 0:
        _broadcast_in_pipeline(session, raw, src, ~place)
    elif session.rank != src:
        copy(raw, segment.tensor(place, raw.numel(), torch.uint8), session.num_threads)
    session.sync()


def _broadcast_in_pipeline(session: CollectiveSession, raw: Tensor, src: int, place: int) -> None:
    """Rank `src` stages its pieces in order; the others copy them as they come."""
    tag, threads = session.number << 24, session.num_threads
    num_pieces = 0
    for low in range(0, raw.numel(), STAGING_BYTES):
        if low:
            session.sync()  # the staging area starts anew
        high = min(low + STAGING_BYTES, raw.numel())
        for start in range(low, high, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, high)
            piece = session.segment.tensor(place + start - low, stop - start, torch.uint8)
            num_pieces += 1
            if session.rank == src:
                copy(piece, raw[start:stop], threads)
                session.control.publish(PIECES, tag | num_pieces)
            else:
                session.await_word(src, PIECES, tag | num_pieces)
                copy(raw[start:stop], piece, threads)
