"""One collective through shared memory: enter it, compare calls, synchronise inside it, and stage tensors."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from murmura.collectives.reduction import Reduction
from murmura.errors import PeerTimeout, TransportError
from murmura.transports.shared_memory import futex
from murmura.transports.shared_memory.control_block import (
    CALLED,
    DIGEST,
    ENTERED,
    PHASE,
    PLACE_IN,
    PLACE_OUT,
    STAGED_AT,
    ControlBlock,
    digest_of,
)
from murmura.transports.shared_memory.peer_memory import OFFERED, PeerMemory
from murmura.transports.shared_memory.point_to_point import MessageExchange
from murmura.transports.shared_memory.threads import GRAIN, num_threads, piece_bytes

STAGING_BYTES = 64 * 2**20  # at most, for a rank; longer messages go in blocks of this
TABLE_SECONDS = 2.0  # how long a rank waits for the others' part of the table of a mismatch


class CollectiveSession:
    """The collective under way on a channel; `begin` starts the next one."""

    def __init__(self, control: ControlBlock, messages: MessageExchange) -> None:
        self.control = control
        self.segment = control.segment
        self.rank = control.rank
        self.world_size = control.world_size
        self.peers = [
            (self.rank + step) % self.world_size for step in range(1, self.world_size)
        ]  # each begins elsewhere
        self.number = 0
        self.memory = PeerMemory(control)
        self._messages = messages
        self._operation = ""
        self._timeout = 0.0
        self._spin = False
        self._num_threads = 0  # 0 until somebody asks, which takes a system call
        self._phase = 0
        self._staging = (-1, 0)  # place and size
        self._outgrown: list[int] = []  # staging areas that a peer may still be reading

    def begin(self, number: int, operation: str, timeout: float, *, spin: bool) -> None:
        """Start collective `number`, which errors call `operation`."""
        self.number, self._operation, self._timeout, self._spin = number, operation, timeout, spin
        self._num_threads = 0 if spin else 1

    @property
    def num_threads(self) -> int:
        """How many threads may share the work: several in the main thread only, as only that may spin."""
        if not self._num_threads:
            self._num_threads = num_threads(self.segment.world_size)
        return self._num_threads

    def enter(self, call: str, place_in: int = 0, place_out: int = 0) -> None:
        """Enter the collective; return when all have, and have called the same. Places are for the peers to know."""
        control, parity, digest = self.control, self.number & 1, digest_of(call)
        words = control.words
        words[control.own + DIGEST + parity] = digest
        words[control.own + PLACE_IN + parity] = place_in
        words[control.own + PLACE_OUT + parity] = place_out
        control.publish(ENTERED, self.number)
        self.await_entry()
        if any(control.read(peer, DIGEST + parity) != digest for peer in control.peers):
            self.disagree(call)
        # All have entered, so all have left the collective before: nobody reads an old staging area any more.
        while self._outgrown:
            self.segment.give_back(self._outgrown.pop())

    def absent_peers(self) -> list[int]:
        """Who has not entered the collective."""
        return [peer for peer in self.control.peers if self.control.read(peer, ENTERED) < self.number]

    def await_entry(self) -> None:
        control = self.control
        if control.any_below(ENTERED, self.number):
            control.wait(
                self.absent_peers,
                self._operation,
                self._timeout,
                spin=self._spin,
                stuck=self._messages.awaits_in_vain,
            )
        self._order_reads()

    def sync(self) -> None:
        """Wait until every rank has reached this point of the collective."""
        control = self.control
        self._phase = phase = self._phase + 1
        control.publish(PHASE, phase)
        if control.any_below(PHASE, phase):
            control.wait(
                lambda: [peer for peer in control.peers if control.read(peer, PHASE) < phase],
                self._operation,
                self._timeout,
                spin=self._spin,
            )
        self._order_reads()

    def await_word(self, peer: int, word: int, value: int) -> None:
        """Wait until a word of `peer` has reached `value`."""
        words, at = self.control.words, self.control.at[peer] + word
        if words[at] < value:
            missing = lambda: [peer] if words[at] < value else []  # noqa: E731
            self.control.wait(missing, self._operation, self._timeout, spin=self._spin)
        self._order_reads()

    def _order_reads(self) -> None:
        """Make sure that what a peer wrote before the word we waited for is read after it."""
        if not futex.ORDERED_STORES:
            self.control.fence()

    def disagree(self, call: str) -> None:
        """Publish what this rank called, collect what the others called, and raise the table as an error."""
        control = self.control
        control.tell_call(self.number, call)
        give_up = time.monotonic() + TABLE_SECONDS
        calls = {self.rank: call}
        for peer in control.peers:
            while control.read(peer, CALLED) < self.number and time.monotonic() < give_up:
                os.sched_yield()
            told = control.told_call(peer) if control.read(peer, CALLED) == self.number else "(did not say)"
            calls[peer] = told
        raise control.reporter.mismatch(self._operation, calls)

    def staging_places(self) -> list[int]:
        return [place for place in (self._staging[0], *self._outgrown, *self._messages.staging_places()) if place >= 0]

    def places(self, word: int) -> list[int]:
        """Where every rank's input (PLACE_IN) or output (PLACE_OUT) lies."""
        return [self.control.read(rank, word + (self.number & 1)) for rank in range(self.world_size)]

    def stage_offered(self, inputs: list[int], outputs: list[int], num_bytes: int) -> tuple[list[int], list[int]]:
        """Stage what some ranks offered, because others did not: the places of all ranks, anew."""
        control = self.control
        if inputs[self.rank] >= OFFERED:
            control.words[control.own + STAGED_AT] = ~self.stage(num_bytes)
        self.sync()
        staged = {rank: control.read(rank, STAGED_AT) for rank, place in enumerate(inputs) if place >= OFFERED}
        return (
            [staged.get(rank, place) for rank, place in enumerate(inputs)],
            [staged.get(rank, place) for rank, place in enumerate(outputs)],
        )

    def read_peer(self, peer: int, address: int, target: int, num_bytes: int) -> None:
        """Copy memory of `peer`, which it offered; if that fails, `peer` is lost, or the kernel has become stricter."""
        try:
            self.memory.read(peer, address, target, num_bytes)
        except OSError as error:
            with contextlib.suppress(PeerTimeout):  # its death may show a moment later
                self.control.wait(lambda: [peer], self._operation, TABLE_SECONDS, spin=False)
            own, other = self.control.reporter.own, self.control.reporter.world_rank(peer)
            raise TransportError(
                f"rank {own} could read the memory of rank {other} before, but not in {self._operation} "
                f"({error.strerror or error}). Did rank {other} change its user or restrict its process?",
                rank=own,
                peer=other,
                operation=self._operation,
            ) from error

    def reduce(self, reduction: Reduction, inputs: Sequence[Any], out: Any) -> None:
        """`reduction.reduce` with no more threads than may share the work; numpy takes one in any case."""
        if reduction.uses_numpy or out.numel() <= GRAIN:
            reduction.reduce(inputs, out)
            return
        step = piece_bytes(self.num_threads, out.element_size()) // out.element_size()
        for start in range(0, out.numel(), step):
            reduction.reduce([each[start : start + step] for each in inputs], out[start : start + step])

    def stage(self, num_bytes: int) -> int:
        """The place of this rank's staging area, for a message of so many bytes or a block of it."""
        place, size = self._staging
        wanted = min(STAGING_BYTES, num_bytes)
        if size < wanted:
            if place >= 0:
                self._outgrown.append(place)
            place = self.segment.take(wanted)
            self._staging = place, wanted
        return place
