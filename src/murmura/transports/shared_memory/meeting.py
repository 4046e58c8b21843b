"""How the ranks of a channel meet in a collective: enter, agree, meet again, and lend each other staging areas."""

from __future__ import annotations

import os
import time

from murmura.transports.shared_memory import futex
from murmura.transports.shared_memory.board import (
    CALLED,
    DIGEST,
    ENTERED,
    PHASE,
    PLACE_IN,
    PLACE_OUT,
    Board,
    digest_of,
)
from murmura.transports.shared_memory.mail import Mail

STAGING_BYTES = 64 * 2**20  # at most, for a rank; longer messages go in blocks of this
TABLE_SECONDS = 2.0  # how long a rank waits for the others' part of the table of a mismatch


class Meeting:
    """The collective under way on a channel; `begin` starts the next one."""

    def __init__(self, board: Board, mail: Mail) -> None:
        self.board = board
        self.segment = board.segment
        self.rank = board.rank
        self.world_size = board.world_size
        self.number = 0
        self._mail = mail
        self._operation = ""
        self._timeout = 0.0
        self._spin = False
        self._phase = 0
        self._staging = (-1, 0)  # place and size
        self._outgrown: list[int] = []  # staging areas that a peer may still be reading

    def begin(self, number: int, operation: str, timeout: float, *, spin: bool) -> None:
        """Turn to collective `number`, which is called `operation` in errors."""
        self.number, self._operation, self._timeout, self._spin = number, operation, timeout, spin

    def enter(self, call: str, place_in: int = 0, place_out: int = 0) -> None:
        """Enter the collective; return when all have, and have called the same. Places are for the peers to know."""
        board, parity, digest = self.board, self.number & 1, digest_of(call)
        words = board.words
        words[board.own + DIGEST + parity] = digest
        words[board.own + PLACE_IN + parity] = place_in
        words[board.own + PLACE_OUT + parity] = place_out
        board.publish(ENTERED, self.number)
        self.await_entry()
        if any(board.read(peer, DIGEST + parity) != digest for peer in board.peers):
            self.disagree(call)
        # All have entered, so all have left the collective before: nobody reads an old staging area any more.
        while self._outgrown:
            self.segment.give_back(self._outgrown.pop())

    def await_entry(self) -> None:
        board, number = self.board, self.number
        board.wait(
            lambda: [peer for peer in board.peers if board.read(peer, ENTERED) < number],
            self._operation,
            self._timeout,
            spin=self._spin,
            stuck=self._mail.awaits_in_vain,
        )
        self._see()

    def sync(self) -> None:
        """Meet again inside the collective."""
        board = self.board
        self._phase = phase = self._phase + 1
        board.publish(PHASE, phase)
        board.wait(
            lambda: [peer for peer in board.peers if board.read(peer, PHASE) < phase],
            self._operation,
            self._timeout,
            spin=self._spin,
        )
        self._see()

    def await_word(self, peer: int, word: int, value: int) -> None:
        """Wait until a word of `peer` has reached `value`."""
        words, at = self.board.words, self.board.at[peer] + word
        if words[at] < value:
            missing = lambda: [peer] if words[at] < value else []  # noqa: E731
            self.board.wait(missing, self._operation, self._timeout, spin=self._spin)
        self._see()

    def _see(self) -> None:
        """What a peer wrote before the word we waited for is read after it."""
        if not futex.ORDERED_STORES:
            self.board.fence()

    def disagree(self, call: str) -> None:
        """Tell what this rank called, hear what the others did, and raise the table."""
        board = self.board
        board.tell_call(self.number, call)
        give_up = time.monotonic() + TABLE_SECONDS
        calls = {self.rank: call}
        for peer in board.peers:
            while board.read(peer, CALLED) < self.number and time.monotonic() < give_up:
                os.sched_yield()
            told = board.told_call(peer) if board.read(peer, CALLED) == self.number else "(did not say)"
            calls[peer] = told
        raise board.reporter.mismatch(self._operation, calls)

    def staging_places(self) -> list[int]:
        return [place for place in (self._staging[0], *self._outgrown, *self._mail.staging_places()) if place >= 0]

    def places(self, word: int) -> list[int]:
        """Where every rank's input (PLACE_IN) or output (PLACE_OUT) lies."""
        return [self.board.read(rank, word + (self.number & 1)) for rank in range(self.world_size)]

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
