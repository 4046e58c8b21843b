"""All-reduce of large tensors of which some lie outside the segment.

Each rank reduces one chunk of a block. It *stages* the other chunks of its tensor, that is, copies them into its part
of the segment for those who reduce them; its own chunk it reads, and writes, where the tensor lies. The others copy
a result from its *home*: where an input was staged that is not needed any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from murmura.collectives.chunks import Segment, chunk_bounds, plan_segments
from murmura.collectives.reduction import Reduction
from murmura.transports.shared_memory.session import STAGING_BYTES, CollectiveSession
from murmura.transports.shared_memory.threads import piece_bytes


class StagedAllReduce:
    """One all-reduce; `inputs` and `outputs` are every rank's places, ~place for a staging area."""

    def __init__(
        self,
        session: CollectiveSession,
        flat_in: Tensor,
        flat_out: Tensor,
        reduction: Reduction,
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        self._session, self._reduction = session, reduction
        self._rank, self._size = session.rank, session.world_size
        self._numel, self._dtype = flat_in.numel(), flat_in.dtype
        self._inputs, self._outputs = inputs, outputs
        self._own_in, self._own_out = reduction.array(flat_in), reduction.array(flat_out)
        self._peers = session.peers
        self._staged = [place < 0 for place in inputs]

    def run(self) -> None:
        block = STAGING_BYTES // self._dtype.itemsize
        for low in range(0, self._numel, block):
            if low:
                self._session.sync()  # the staging areas start anew
            self._reduce_block(low, min(low + block, self._numel))

    def _reduce_block(self, low: int, high: int) -> None:
        """Reduce elements [low, high)."""
        item_bytes = self._dtype.itemsize
        piece = piece_bytes(self._session.num_threads, item_bytes)
        bounds = [chunk_bounds(high - low, self._size, chunk) for chunk in range(self._size)]
        chunks = [
            plan_segments(self._numel, item_bytes, self._size, low + start, low + stop, piece) for start, stop in bounds
        ]
        sources, targets = self._arrays(self._inputs, low, high), self._arrays(self._outputs, low, high)
        if self._staged[self._rank]:
            for peer in self._peers:
                for start, stop, _ in chunks[peer]:
                    sources[self._rank][start - low : stop - low] = self._own_in[start:stop]
        self._session.sync()
        for segment in chunks[self._rank]:
            self._reduce(segment, low, sources, targets)
        self._session.sync()
        if self._staged[self._rank]:
            for peer in self._peers:
                for start, stop, first in chunks[peer]:
                    home = self._home(peer, first)
                    assert home is not None
                    self._own_out[start:stop] = targets[home][start - low : stop - low]

    def _arrays(self, places: Sequence[int], low: int, high: int) -> list[Any]:
        """Every rank's part of the block as far as it lies in the segment."""
        starts = [~place if place < 0 else place + low * self._dtype.itemsize for place in places]
        tensors = [self._session.segment.tensor(start, high - low, self._dtype) for start in starts]
        return [self._reduction.array(tensor) for tensor in tensors]

    def _home(self, chunk: int, first: int) -> int | None:
        """Whose staging area gets a result that rank `chunk` sums beginning with rank `first`; None if none is needed.

        The second input of a sum comes before the first: for most results, that is the rank's own.
        """
        for step in (1, 0, *range(2, self._size)):
            rank: int = (first + step) % self._size
            if self._staged[rank] and rank != chunk:
                return rank
        return None

    def _reduce(self, segment: Segment, low: int, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Reduce a piece of this rank's chunk, and write it wherever it is wanted."""
        start, stop, first = segment
        here = slice(start - low, stop - low)

        def array(rank: int, own: Any, others: Sequence[Any]) -> Any:
            return own[start:stop] if rank == self._rank else others[rank][here]

        order = [(first + step) % self._size for step in range(self._size)]
        home = self._home(self._rank, first)
        made_at = home if home in order[:2] else first  # it may overlap no other input than the first two
        result = array(made_at, self._own_out, targets)
        self._reduction.reduce([array(rank, self._own_in, sources) for rank in order], result)
        for rank in order:
            if rank != made_at and (rank in (self._rank, home) or not self._staged[rank]):
                array(rank, self._own_out, targets)[:] = result
