"""Messages from rank to rank through shared memory: each pair of ranks has control words and a staging area.

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
from murmura.transports.shared_memory.control_block import (
    AWAITS,
    ENTERED,
    PAIR_BYTES,
    PAIRS_AT,
    ControlBlock,
    digest_of,
)

# Words of a pair's line, in the control block of the rank that writes them
SENT = 0  # message << 24 | pieces that may be read
DIGEST = 1  # of what is sent
PLACE = 2  # where piece 0 lies
SLOTS = 3  # pieces the staging area holds, after which it starts anew; 0 when the whole message lies at PLACE
TAKEN = 8  # message << 24 | pieces read; in the receiver's block
REFUSED = 9  # message that does not fit what is wanted; in the receiver's block
TEXT_AT, TEXT_BYTES = 96, 160  # what is sent or wanted, in words

STAGING_PIECES = 64  # at most, for a pair
TURN = 4  # pieces before the other direction gets its turn


class _Pair:
    """The control words that this rank and one peer write for each other."""

    def __init__(self, control: ControlBlock, peer: int) -> None:
        self.peer = peer
        self._control = control
        self._own = (control.blocks[control.rank] + PAIRS_AT + PAIR_BYTES * peer) // 8
        self._theirs = (control.blocks[peer] + PAIRS_AT + PAIR_BYTES * control.rank) // 8
        self.num_sent = 0
        self.num_received = 0
        self.staging_place = -1
        self.staging_slots = 0

    def write(self, word: int, value: int) -> None:
        self._control.words[self._own + word] = value

    def read(self, word: int) -> int:
        return self._control.words[self._theirs + word]

    def write_text(self, text: str) -> None:
        data = text.encode()[: TEXT_BYTES - 8]
        at = 8 * self._own + TEXT_AT
        self._control.segment.memory[at : at + 8 + len(data)] = struct.pack("q", len(data)) + data

    def read_text(self) -> str:
        at = 8 * self._theirs + TEXT_AT
        memory = self._control.segment.memory
        (length,) = struct.unpack("q", memory[at : at + 8])
        return bytes(memory[at + 8 : at + 8 + length]).decode(errors="replace")

    def staging(self, num_pieces: int) -> tuple[int, int]:
        """Place and slots of a staging area for a message of so many pieces; it grows and is kept."""
        slots = min(num_pieces, STAGING_PIECES)
        if slots > self.staging_slots:
            if self.staging_place >= 0:
                self._control.segment.give_back(self.staging_place)
            self.staging_place = self._control.segment.take(slots * PIECE_BYTES)
            self.staging_slots = slots
        return self.staging_place, self.staging_slots


class _Message:
    """One tensor being sent or received."""

    def __init__(self, pair: _Pair, flat: Tensor, text: str) -> None:
        self.pair = pair
        self.text = text
        self.raw: Any = flat.view(torch.uint8).numpy()
        self.num_pieces = max(1, -(-len(self.raw) // PIECE_BYTES))
        self.done = 0  # pieces sent or received
        self.number = 0  # 0 until it has begun

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        return first * PIECE_BYTES, min(last * PIECE_BYTES, len(self.raw))


class Sending(_Message):
    """A message to a peer; `advance` stages its next pieces."""

    def __init__(self, pair: _Pair, flat: Tensor, text: str, place: int) -> None:
        super().__init__(pair, flat, text)
        self.place = place  # in this rank's arena, or -1

    def begin(self) -> None:
        pair = self.pair
        pair.num_sent += 1
        self.number = pair.num_sent
        place, slots = (self.place, 0) if self.place >= 0 else pair.staging(self.num_pieces)
        self.place, self.slots = place, slots
        pair.write_text(self.text)
        pair.write(DIGEST, digest_of(self.text))
        pair.write(PLACE, place)
        pair.write(SLOTS, slots)

    def advance(self, control: ControlBlock) -> bool:
        """Stage what there is room for; True if anything changed."""
        if not self.number:
            self.begin()
            if self.slots == 0:
                self.done = self.num_pieces
            self._publish(control)
            return True
        taken = self._taken()
        room = min(self.num_pieces, taken + self.slots, self.done + TURN)
        if self.done >= room:
            return False
        for piece in range(self.done, room):
            start, stop = self.bounds(piece, piece + 1)
            at = self.place + piece % self.slots * PIECE_BYTES
            control.segment.bytes[at : at + stop - start] = self.raw[start:stop]
        self.done = room
        self._publish(control)
        return True

    def _publish(self, control: ControlBlock) -> None:
        control.fence()
        self.pair.write(SENT, self.number << 24 | self.done)
        control.wake_sleepers()

    def _taken(self) -> int:
        taken = self.pair.read(TAKEN)
        return taken & 0xFFFFFF if taken >> 24 == self.number else 0

    @property
    def finished(self) -> bool:
        return self.number > 0 and self._taken() == self.num_pieces

    @property
    def refused(self) -> bool:
        return self.number > 0 and self.pair.read(REFUSED) == self.number


class Receiving(_Message):
    """A message from a peer; `advance` copies the pieces that are ready."""

    def advance(self, control: ControlBlock) -> bool:
        """Copy what has come; True if anything changed."""
        pair = self.pair
        if not self.number:
            pair.num_received += 1
            self.number = pair.num_received
        sent = pair.read(SENT)
        if sent >> 24 != self.number:
            return False
        control.fence()
        if self.done == 0 and pair.read(DIGEST) != digest_of(self.text):
            self._refuse(control)
        ready = min(sent & 0xFFFFFF, self.done + TURN)
        if self.done >= ready:
            return False
        place, slots = pair.read(PLACE), pair.read(SLOTS)
        for piece in range(self.done, ready):
            start, stop = self.bounds(piece, piece + 1)
            at = place + (piece % slots if slots else piece) * PIECE_BYTES
            self.raw[start:stop] = control.segment.bytes[at : at + stop - start]
        self.done = ready
        control.fence()
        pair.write(TAKEN, self.number << 24 | ready)
        control.wake_sleepers()
        return True

    def _refuse(self, control: ControlBlock) -> None:
        pair = self.pair
        sent = pair.read_text()
        pair.write_text(self.text)
        control.fence()
        pair.write(REFUSED, self.number)
        control.wake_sleepers()
        own, peer = control.reporter.own, control.reporter.world_rank(pair.peer)
        calls = {pair.peer: f"send(dst={own}) of {sent}", control.rank: f"recv(src={peer}) of {self.text}"}
        raise control.reporter.mismatch("exchange", calls)

    @property
    def finished(self) -> bool:
        return self.done == self.num_pieces


class MessageExchange:
    """The point-to-point messages between this rank and all its peers."""

    def __init__(self, control: ControlBlock) -> None:
        self._control = control
        self._pairs = {peer: _Pair(control, peer) for peer in control.peers}

    def staging_places(self) -> list[int]:
        return [pair.staging_place for pair in self._pairs.values() if pair.staging_place >= 0]

    def exchange(
        self,
        sends: list[tuple[Tensor, int, str]],
        recvs: list[tuple[Tensor, int, str]],
        operation: str,
        timeout: float,
        *,
        spin: bool,
    ) -> None:
        """Move all messages at once: contiguous CPU tensors, each with a peer and a description for errors."""
        control = self._control
        # Between two ranks, one message at a time in each direction, in order; all pairs and directions at once.
        queues: dict[tuple[int, bool], deque[Sending | Receiving]] = {}
        for flat, peer, text in sends:
            message = Sending(self._pairs[peer], flat, text, control.segment.place_of(flat))
            queues.setdefault((peer, False), deque()).append(message)
        for flat, peer, text in recvs:
            queues.setdefault((peer, True), deque()).append(Receiving(self._pairs[peer], flat, text))

        def advance() -> bool:
            moved = False
            for queue in queues.values():
                while queue:
                    message = queue[0]
                    if isinstance(message, Sending) and message.refused:
                        self._refused(message, operation)
                    moved |= message.advance(control)
                    if not message.finished:
                        break
                    queue.popleft()
                    moved = True
            return moved

        def missing() -> list[int]:
            return [] if advance() else self._awaited(queues)

        def stuck(peer: int) -> bool:
            return control.read(peer, ENTERED) > control.read(control.rank, ENTERED)

        try:
            while any(queues.values()):
                if not advance() and any(queues.values()):
                    control.wait(missing, operation, timeout, spin=spin, stuck=stuck)
        finally:
            control.words[control.own + AWAITS] = 0

    def _awaited(self, queues: dict[tuple[int, bool], deque[Sending | Receiving]]) -> list[int]:
        """Whom this rank still waits for; the first of them is told in shared words."""
        unfinished = [(peer, receives, queue[0].number) for (peer, receives), queue in queues.items() if queue]
        if unfinished:
            peer, receives, number = unfinished[0]
            self._control.words[self._control.own + AWAITS] = number << 16 | receives << 15 | (peer + 1)
        return sorted({peer for peer, _, _ in unfinished})

    def awaits_in_vain(self, peer: int) -> bool:
        """Whether `peer` sleeps in an exchange with this rank that this rank has not come to."""
        awaits = self._control.read(peer, AWAITS)
        if awaits & 0x7FFF != self._control.rank + 1:
            return False
        pair = self._pairs[peer]
        done = pair.num_sent if awaits & 0x8000 else pair.num_received
        return awaits >> 16 > done

    def _refused(self, message: Sending, operation: str) -> None:
        rank, peer, reporter = self._control.rank, message.pair.peer, self._control.reporter
        calls = {
            rank: f"send(dst={reporter.world_rank(peer)}) of {message.text}",
            peer: f"recv(src={reporter.own}) of {message.pair.read_text()}",
        }
        raise reporter.mismatch(operation, calls)
