"""All-gather and reduce-scatter of equal parts through the shared segment.

Small messages are copied through slots. Large ones in memory from `allocate` are read, or written, where they lie; any
other is read by the peers where it lies, if all ranks offer theirs, or goes through its rank's staging area in pieces,
which the peers take as they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from murmura.collectives.chunks import PIECE_BYTES
from murmura.collectives.reduction import Reduction
from murmura.transports.shared_memory.attached_gather import gather_attached, reduce_scatter_attached
from murmura.transports.shared_memory.control_block import PIECES, PLACE_IN, PLACE_OUT, slot_bytes
from murmura.transports.shared_memory.peer_memory import OFFERED
from murmura.transports.shared_memory.segment import Segment
from murmura.transports.shared_memory.session import STAGING_BYTES, CollectiveSession

PIECES_AHEAD = 2


def all_gather_in_segment(session: CollectiveSession, parts: Sequence[Tensor], own: Tensor, call: str) -> None:
    """Fill `parts`, one for each rank, with every rank's `own`, which may be this rank's part."""
    segment, rank, size = session.segment, session.rank, own.nbytes
    raw_parts = [_bytes_of(part) for part in parts]
    raw = _bytes_of(own)
    in_place = own.data_ptr() == parts[rank].data_ptr()
    if size <= slot_bytes(session.world_size):
        slots = [segment.bytes[place : place + size] for place in session.control.slots[session.number & 1]]
        slots[rank][:] = raw
        session.enter(call)
        for peer, slot in enumerate(slots):
            raw_parts[peer][:] = slot
        return
    place_in = segment.place_of(own)
    if place_in < 0:
        place_in = session.memory.offer(own.data_ptr(), size) or ~session.stage(size)
    session.enter(call, place_in, _place_of_all(segment, parts))
    inputs, outputs = session.places(PLACE_IN), session.places(PLACE_OUT)
    if all(place >= 0 for place in outputs):
        targets = [segment.bytes[place + rank * size : place + (rank + 1) * size] for place in outputs]
        _push(raw, [target for peer, target in enumerate(targets) if not (peer == rank and in_place)], rank)
        session.sync()
        return
    if all(place >= OFFERED for place in inputs):
        if not in_place:
            raw_parts[rank][:] = raw
        gather_attached(session, raw_parts, [place - OFFERED for place in inputs])
        return
    if any(place >= OFFERED for place in inputs):
        inputs, _ = session.stage_offered(inputs, outputs, size)
    if inputs[rank] >= 0 and not in_place:
        raw_parts[rank][:] = raw
    for peer in session.peers:
        if inputs[peer] >= 0:
            raw_parts[peer][:] = segment.bytes[inputs[peer] : inputs[peer] + size]
    if any(place < 0 for place in inputs):
        _gather_in_pipeline(session, raw_parts, raw, inputs, [peer for peer in session.peers if inputs[peer] < 0])
    if any(place >= 0 for place in inputs):
        session.sync()  # nobody reads this rank's tensor any more


def _push(raw: Any, targets: Sequence[Any], rank: int) -> None:
    """Copy `raw` to every target, piece by piece so that it stays in the cache; each rank begins with another."""
    turned = [*targets[rank:], *targets[:rank]]
    for start in range(0, len(raw), PIECE_BYTES):
        for target in turned:
            target[start : start + PIECE_BYTES] = raw[start : start + PIECE_BYTES]


def _gather_in_pipeline(
    session: CollectiveSession, parts: Sequence[Any], raw: Any, inputs: Sequence[int], staged_peers: Sequence[int]
) -> None:
    """Ranks whose tensor is elsewhere stage its pieces in order; all take them as they come."""
    memory, own_part = session.segment.bytes, parts[session.rank]
    in_place = own_part.ctypes.data == raw.ctypes.data
    own_place = ~inputs[session.rank] if inputs[session.rank] < 0 else -1
    tag, num_done = session.number << 24, 0
    for low in range(0, len(raw), STAGING_BYTES):
        if low:
            session.sync()  # the staging areas start anew
        bounds = _pieces(low, min(low + STAGING_BYTES, len(raw)), PIECE_BYTES)
        for turn in range(len(bounds) + PIECES_AHEAD):
            if turn < len(bounds) and own_place >= 0:
                start, stop = bounds[turn]
                memory[own_place + start - low : own_place + stop - low] = raw[start:stop]
                session.control.publish(PIECES, tag | (num_done + turn + 1))
                if not in_place:  # while the piece is in the cache
                    own_part[start:stop] = raw[start:stop]
            if turn >= PIECES_AHEAD:
                start, stop = bounds[turn - PIECES_AHEAD]
                for peer in staged_peers:
                    session.await_word(peer, PIECES, tag | (num_done + turn - PIECES_AHEAD + 1))
                    place = ~inputs[peer] - low
                    parts[peer][start:stop] = memory[place + start : place + stop]
        num_done += len(bounds)


def reduce_scatter_in_segment(
    session: CollectiveSession, out: Tensor, parts: Sequence[Tensor], reduction: Reduction, call: str
) -> None:
    """Reduce every rank's `parts[r]`, in rank order, into the `out` of rank r, which overlaps none of them."""
    segment, rank, numel, dtype = session.segment, session.rank, out.numel(), out.dtype
    if out.nbytes * len(parts) <= slot_bytes(session.world_size):
        slots = session.control.slots[session.number & 1]
        for index, part in enumerate(parts):
            place = slots[rank] + index * out.nbytes
            segment.bytes[place : place + out.nbytes] = _bytes_of(part)
        session.enter(call)
        mine = [segment.tensor(place + rank * out.nbytes, numel, dtype) for place in slots]
        session.reduce(reduction, [reduction.array(each) for each in mine], reduction.array(out))
        return
    place, num_bytes = _place_of_all(segment, parts), out.nbytes * len(parts)
    if place < 0:
        may_offer = _adjoin(parts)
        place = (may_offer and session.memory.offer(parts[0].data_ptr(), num_bytes)) or ~session.stage(num_bytes)
    session.enter(call, place)
    inputs = session.places(PLACE_IN)
    if all(place >= OFFERED for place in inputs):
        reduce_scatter_attached(session, out, parts[rank], reduction, [place - OFFERED for place in inputs])
        return
    if any(place >= OFFERED for place in inputs):
        inputs, _ = session.stage_offered(inputs, inputs, num_bytes)
    _reduce_in_pipeline(session, out, parts, reduction, inputs)
    if any(place >= 0 for place in inputs):
        session.sync()


def _reduce_in_pipeline(
    session: CollectiveSession, out: Tensor, parts: Sequence[Tensor], reduction: Reduction, inputs: Sequence[int]
) -> None:
    """Ranks whose tensor is elsewhere stage, piece by piece, what the others want of it."""
    segment, rank, world_size = session.segment, session.rank, session.world_size
    numel, dtype = out.numel(), out.dtype
    size = min(numel, STAGING_BYTES // world_size // dtype.itemsize)  # elements of a part staged at a time
    own, result = reduction.array(parts[rank]), reduction.array(out)
    others = session.peers
    staged = inputs[rank] < 0
    staged_peers = [peer for peer in others if inputs[peer] < 0]

    def staging(owner: int, wanted_by: int) -> Any:
        return reduction.array(segment.tensor(~inputs[owner] + wanted_by * size * dtype.itemsize, size, dtype))

    outgoing = {peer: (reduction.array(parts[peer]), staging(rank, peer)) for peer in others} if staged else {}
    incoming = {peer: staging(peer, rank) for peer in staged_peers}
    lying = {
        peer: reduction.array(segment.tensor(inputs[peer] + rank * out.nbytes, numel, dtype))
        for peer in others
        if inputs[peer] >= 0
    }
    tag, num_done = session.number << 24, 0
    for low in range(0, numel, size):
        if low and (staged or staged_peers):
            session.sync()  # the staging areas start anew
        bounds = _pieces(low, min(low + size, numel), max(1, PIECE_BYTES // dtype.itemsize))
        for turn in range(len(bounds) + PIECES_AHEAD):
            if turn < len(bounds) and staged:
                start, stop = bounds[turn]
                for source, area in outgoing.values():
                    area[start - low : stop - low] = source[start:stop]
                session.control.publish(PIECES, tag | (num_done + turn + 1))
            if turn >= PIECES_AHEAD:
                start, stop = bounds[turn - PIECES_AHEAD]
                for peer in staged_peers:
                    session.await_word(peer, PIECES, tag | (num_done + turn - PIECES_AHEAD + 1))
                pieces = [
                    own[start:stop]
                    if peer == rank
                    else lying[peer][start:stop]
                    if peer in lying
                    else incoming[peer][start - low : stop - low]
                    for peer in range(world_size)
                ]
                session.reduce(reduction, pieces, result[start:stop])
        num_done += len(bounds)


def _pieces(low: int, high: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, high)) for start in range(low, high, step)]


def _bytes_of(flat: Tensor) -> Any:
    return flat.view(torch.uint8).numpy()


def _place_of_all(segment: Segment, parts: Sequence[Tensor]) -> int:
    """Where `parts` lie in this rank's arena, one after the other; -1 if they do not."""
    first = segment.place_of(parts[0])
    return first if first >= 0 and _adjoin(parts) and segment.place_of(parts[-1]) >= 0 else -1


def _adjoin(parts: Sequence[Tensor]) -> bool:
    first, size = parts[0].data_ptr(), parts[0].nbytes
    return all(part.data_ptr() == first + index * size for index, part in enumerate(parts))
