"""Messages from rank to rank through shared memory: every pair of ranks has a line of words, and a staging area.

A tensor that lies in the sender's arena is copied once, by the receiver; any other is staged in pieces, so that both
ranks copy at the same time. Words are tagged with the number of the message, so nothing is ever reset.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

import torch
from torch import Tensor

from murmura.collectives.chunks import PIECE_BYTES
from murmura.transports.shared_memory.board import AWAITS, ENTERED, PAIR_BYTES, PAIRS_AT, Board, digest_of

# Words of a pair's line, in the block of the rank that writes them
SENT = 0  # message << 24 | pieces that may be read
DIGEST = 1  # of what is sent
PLACE = 2  # where piece 0 lies
SLOTS = 3  # pieces the staging area holds, after which it starts anew; 0 when the whole message lies at PLACE
TAKEN = 8  # message << 24 | pieces read; in the receiver's block
REFUSED = 9  # message that does not fit what is wanted; in the receiver's block
TEXT_AT, TEXT_BYTES = 96, 160  # what is sent or wanted, in words

STAGING_PIECES = 64  # at most, for a pair
TURN = 4  # pieces before the other direction gets its turn


class _Line:
    """The lines of one pair of ranks: ours, and the peer's."""

    def __init__(self, board: Board, peer: int) -> None:
        self.peer = peer
        self._board = board
        self._own = (board.blocks[board.rank] + PAIRS_AT + PAIR_BYTES * peer) // 8
        self._theirs = (board.blocks[peer] + PAIRS_AT + PAIR_BYTES * board.rank) // 8
        self.num_sent = 0
        self.num_received = 0
        self.staging_place = -1
        self.staging_slots = 0

    def say(self, word: int, value: int) -> None:
        self._board.words[self._own + word] = value

    def heard(self, word: int) -> int:
        return self._board.words[self._theirs + word]

    def write_text(self, text: str) -> None:
        data = text.encode()[: TEXT_BYTES - 8]
        at = 8 * self._own + TEXT_AT
        self._board.segment.memory[at : at + 8 + len(data)] = struct.pack("q", len(data)) + data

    def read_text(self) -> str:
        at = 8 * self._theirs + TEXT_AT
        memory = self._board.segment.memory
        (length,) = struct.unpack("q", memory[at : at + 8])
        return bytes(memory[at + 8 : at + 8 + length]).decode(errors="replace")

    def staging(self, num_pieces: int) -> tuple[int, int]:
        """Place and slots of a staging area for a message of so many pieces; it grows and is kept."""
        slots = min(num_pieces, STAGING_PIECES)
        if slots > self.staging_slots:
            if self.staging_place >= 0:
                self._board.segment.give_back(self.staging_place)
            self.staging_place = self._board.segment.take(slots * PIECE_BYTES)
            self.staging_slots = slots
        return self.staging_place, self.staging_slots


class _Message:
    """One tensor on its way, seen from one end."""

    def __init__(self, line: _Line, flat: Tensor, text: str) -> None:
        self.line = line
        self.text = text
        self.raw: Any = flat.view(torch.uint8).numpy()
        self.num_pieces = max(1, -(-len(self.raw) // PIECE_BYTES))
        self.done = 0  # pieces sent or received
        self.number = 0  # 0 until it has begun

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        return first * PIECE_BYTES, min(last * PIECE_BYTES, len(self.raw))


class Sending(_Message):
    def __init__(self, line: _Line, flat: Tensor, text: str, place: int) -> None:
        super().__init__(line, flat, text)
        self.place = place  # in this rank's arena, or -1

    def begin(self) -> None:
        line = self.line
        line.num_sent += 1
        self.number = line.num_sent
        place, slots = (self.place, 0) if self.place >= 0 else line.staging(self.num_pieces)
        self.place, self.slots = place, slots
        line.write_text(self.text)
        line.say(DIGEST, digest_of(self.text))
        line.say(PLACE, place)
        line.say(SLOTS, slots)

    def advance(self, board: Board) -> bool:
        """Stage what there is room for; True if anything changed."""
        if not self.number:
            self.begin()
            if self.slots == 0:
                self.done = self.num_pieces
            self._publish(board)
            return True
        taken = self._taken()
        room = min(self.num_pieces, taken + self.slots, self.done + TURN)
        if self.done >= room:
            return False
        for piece in range(self.done, room):
            start, stop = self.bounds(piece, piece + 1)
            at = self.place + piece % self.slots * PIECE_BYTES
            board.segment.bytes[at : at + stop - start] = self.raw[start:stop]
        self.done = room
        self._publish(board)
        return True

    def _publish(self, board: Board) -> None:
        board.fence()
        self.line.say(SENT, self.number << 24 | self.done)
        board.wake_sleepers()

    def _taken(self) -> int:
        taken = self.line.heard(TAKEN)
        return taken & 0xFFFFFF if taken >> 24 == self.number else 0

    @property
    def finished(self) -> bool:
        return self.number > 0 and self._taken() == self.num_pieces

    @property
    def refused(self) -> bool:
        return self.number > 0 and self.line.heard(REFUSED) == self.number


class Receiving(_Message):
    def advance(self, board: Board) -> bool:
        """Copy what has come; True if anything changed."""
        line = self.line
        if not self.number:
            line.num_received += 1
            self.number = line.num_received
        sent = line.heard(SENT)
        if sent >> 24 != self.number:
            return False
        board.fence()
        if self.done == 0 and line.heard(DIGEST) != digest_of(self.text):
            self._refuse(board)
        ready = min(sent & 0xFFFFFF, self.done + TURN)
        if self.done >= ready:
            return False
        place, slots = line.heard(PLACE), line.heard(SLOTS)
        for piece in range(self.done, ready):
            start, stop = self.bounds(piece, piece + 1)
            at = place + (piece % slots if slots else piece) * PIECE_BYTES
            self.raw[start:stop] = board.segment.bytes[at : at + stop - start]
        self.done = ready
        board.fence()
        line.say(TAKEN, self.number << 24 | ready)
        board.wake_sleepers()
        return True

    def _refuse(self, board: Board) -> None:
        line = self.line
        sent = line.read_text()
        line.write_text(self.text)
        board.fence()
        line.say(REFUSED, self.number)
        board.wake_sleepers()
        own, peer = board.reporter.own, board.reporter.world_rank(line.peer)
        calls = {line.peer: f"send(dst={own}) of {sent}", board.rank: f"recv(src={peer}) of {self.text}"}
        raise board.reporter.mismatch("exchange", calls)

    @property
    def finished(self) -> bool:
        return self.done == self.num_pieces


class Mail:
    """The lines of one rank to all its peers."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._lines = {peer: _Line(board, peer) for peer in board.peers}

    def staging_places(self) -> list[int]:
        return [line.staging_place for line in self._lines.values() if line.staging_place >= 0]

    def exchange(
        self,
        sends: list[tuple[Tensor, int, str]],
        recvs: list[tuple[Tensor, int, str]],
        operation: str,
        timeout: float,
        *,
        spin: bool,
    ) -> None:
        """Move all messages (contiguous CPU tensors, with what they are in words) at once."""
        board = self._board
        # Between two ranks, one message at a time in each direction, in order; all pairs and directions at once.
        queues: dict[tuple[int, bool], deque[Sending | Receiving]] = {}
        for flat, peer, text in sends:
            message = Sending(self._lines[peer], flat, text, board.segment.place_of(flat))
            queues.setdefault((peer, False), deque()).append(message)
        for flat, peer, text in recvs:
            queues.setdefault((peer, True), deque()).append(Receiving(self._lines[peer], flat, text))

        def advance() -> bool:
            moved = False
            for queue in queues.values():
                while queue:
                    message = queue[0]
                    if isinstance(message, Sending) and message.refused:
                        self._refused(message, operation)
                    moved |= message.advance(board)
                    if not message.finished:
                        break
                    queue.popleft()
                    moved = True
            return moved

        def missing() -> list[int]:
            return [] if advance() else self._awaited(queues)

        def stuck(peer: int) -> bool:
            return board.read(peer, ENTERED) > board.read(board.rank, ENTERED)

        try:
            while any(queues.values()):
                if not advance() and any(queues.values()):
                    board.wait(missing, operation, timeout, spin=spin, stuck=stuck)
        finally:
            board.words[board.own + AWAITS] = 0

    def _awaited(self, queues: dict[tuple[int, bool], deque[Sending | Receiving]]) -> list[int]:
        """Whom this rank still waits for; the first of them is told in shared words."""
        unfinished = [(peer, receives, queue[0].number) for (peer, receives), queue in queues.items() if queue]
        if unfinished:
            peer, receives, number = unfinished[0]
            self._board.words[self._board.own + AWAITS] = number << 16 | receives << 15 | (peer + 1)
        return sorted({peer for peer, _, _ in unfinished})

    def awaits_in_vain(self, peer: int) -> bool:
        """Whether `peer` sleeps in an exchange with this rank that this rank has not come to."""
        awaits = self._board.read(peer, AWAITS)
        if awaits & 0x7FFF != self._board.rank + 1:
            return False
        line = self._lines[peer]
        done = line.num_sent if awaits & 0x8000 else line.num_received
        return awaits >> 16 > done

    def _refused(self, message: Sending, operation: str) -> None:
        rank, peer, reporter = self._board.rank, message.line.peer, self._board.reporter
        calls = {
            rank: f"send(dst={reporter.world_rank(peer)}) of {message.text}",
            peer: f"recv(src={reporter.own}) of {message.line.read_text()}",
        }
        raise reporter.mismatch(operation, calls)
