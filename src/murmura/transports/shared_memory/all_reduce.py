"""All-reduce through the shared segment.

Small messages are copied through slots. Large ones in memory from `allocate` are reduced where they lie; any other
is read by the other ranks where it lies, if all ranks offer theirs, or goes through its rank's staging area.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from murmura.collectives.chunks import chunk_bounds, is_small, plan_segments
from murmura.collectives.direct import push
from murmura.collectives.reduction import Reduction
from murmura.transports.shared_memory.attached_all_reduce import reduce_attached
from murmura.transports.shared_memory.control_block import PLACE_IN, PLACE_OUT
from murmura.transports.shared_memory.peer_memory import OFFERED
from murmura.transports.shared_memory.session import CollectiveSession
from murmura.transports.shared_memory.staged_all_reduce import StagedAllReduce
from murmura.transports.shared_memory.threads import piece_bytes


def all_reduce_in_segment(
    session: CollectiveSession, flat_in: Tensor, flat_out: Tensor, reduction: Reduction, call: str
) -> None:
    """Reduce `flat_in` over all ranks into `flat_out`, which may be the same."""
    if is_small(flat_in.nbytes, session.world_size):
        _reduce_slots(session, flat_in, flat_out, reduction, call)
        return
    place_in, place_out = session.segment.place_of(flat_in), session.segment.place_of(flat_out)
    if place_in < 0 or place_out < 0:
        # With several threads to copy, staging is faster than reading, which one thread does.
        may_offer = flat_in is flat_out and session.num_threads == 1
        place_in = (may_offer and session.memory.offer(flat_in.data_ptr(), flat_in.nbytes)) or ~session.stage(
            flat_in.nbytes
        )
        place_out = place_in
    session.enter(call, place_in, place_out)
    inputs, outputs = session.places(PLACE_IN), session.places(PLACE_OUT)
    if all(place >= OFFERED for place in inputs):
        reduce_attached(session, flat_in, reduction, [place - OFFERED for place in inputs])
        return
    if any(place >= OFFERED for place in inputs):
        inputs, outputs = session.stage_offered(inputs, outputs, flat_in.nbytes)
    if all(place >= 0 for place in inputs):
        _reduce_in_place(session, flat_in, reduction, inputs, outputs)
    else:
        StagedAllReduce(session, flat_in, flat_out, reduction, inputs, outputs).run()


def _reduce_slots(
    session: CollectiveSession, flat_in: Tensor, flat_out: Tensor, reduction: Reduction, call: str
) -> None:
    slots = session.control.slots[session.number & 1]
    inputs = [session.segment.tensor(place, flat_in.numel(), flat_in.dtype) for place in slots]
    inputs[session.rank].copy_(flat_in)
    session.enter(call)
    session.reduce(reduction, [reduction.array(each) for each in inputs], reduction.array(flat_out))


def _reduce_in_place(
    session: CollectiveSession, like: Tensor, reduction: Reduction, inputs: Sequence[int], outputs: Sequence[int]
) -> None:
    """Everything lies in the segment: each rank reduces its chunk."""

    def arrays(places: Sequence[int]) -> list[Any]:
        return [reduction.array(session.segment.tensor(place, like.numel(), like.dtype)) for place in places]

    sources = arrays(inputs)
    targets = sources if inputs == outputs else arrays(outputs)
    start, stop = chunk_bounds(like.numel(), session.world_size, session.rank)
    piece = piece_bytes(session.num_threads, like.element_size())
    segments = plan_segments(like.numel(), like.element_size(), session.world_size, start, stop, piece)
    push(sources, targets, session.rank, segments, reduction)
    session.sync()
