"""The control blocks of one channel: the words through which its ranks synchronise, and how a rank waits for one.

Each rank has a block of 64-bit words in its own arena. Only that rank writes it, except for its wake word, which peers
write. A rank *enters* a collective by publishing the collective's number. A rank that waits for a peer spins briefly,
then yields, then sets ASLEEP and sleeps in a futex on its own wake word; a peer that publishes a word and sees ASLEEP
changes the wake word and wakes it. Only sleeping ranks look for dead peers and deadlines, so a healthy run pays
nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence

from murmura.collectives.chunks import SMALL_BYTES
from murmura.observe.probe import Probe
from murmura.transports.error_reporter import DIED, ExitNotice, Reporter
from murmura.transports.liveness import STOPPED, PidfdPoll, process_state
from murmura.transports.shared_memory import futex
from murmura.transports.shared_memory.arena import PAGE_BYTES, round_up
from murmura.transports.shared_memory.segment import Segment
from murmura.transports.stalls import StallNotes, WaitDeadline, at_fault, is_recent

# Words of a block. The first eight share a cache line: what a collective of small messages reads of a peer.
ENTERED = 0  # number of the collective entered last
ASLEEP = 1  # threads of the rank that sleep on its wake word
DIGEST = 2  # of the call, by the parity of its number (2 words)
PLACE_IN = 4  # where its input lies, by parity (2 words); ~place for a staging area, OFFERED | address elsewhere
PLACE_OUT = 6  # where its output goes, by parity (2 words)
PHASE = 8  # synchronisations inside collectives
PIECES = 9  # number of the collective << 24 | pieces staged in it
EXITED = 10  # length of the exit notice, once there is one
CALLED = 11  # number of the collective whose call is told in the call text
AWAITS = 12  # message << 16 | 1 << 15 if it is to be received | peer + 1, while the rank sleeps in an exchange
STALLED = 13  # of the world's block: when << 16 | rank + 1 of whom it waits for in vain on any channel; 0 if for nobody
STAGED_AT = 14  # where its input is staged, if it was offered and a peer's was not
WAKE = 16  # on a line of its own: written by peers
NONCE, NONCE_AT = 24, 25  # a number, and where it stands in the memory of the rank's process
# Bytes of a block
GONE_AT = 256  # one for each rank, which sets it when it will never look at this block again
EXIT_NOTICE_AT, EXIT_NOTICE_BYTES = 512, 1536
CALL_AT, CALL_BYTES = 2048, 2048
PAIRS_AT, PAIR_BYTES = 4096, 256

SPINS, YIELDS = 50, 200
YIELD_SECONDS = 0.02  # at most: on a busy machine each yield may take as long
FIRST_NAP, LONGEST_NAP = 0.005, 0.1  # seconds between two looks at deaths and deadlines


def slot_bytes(world_size: int) -> int:
    """The largest message that takes the small path."""
    return SMALL_BYTES // max(1, world_size - 1)


def block_bytes(world_size: int) -> int:
    """What a rank's block takes: words, texts, a line for each pair, and two slots for small messages."""
    return slots_at(world_size) + 2 * (round_up(slot_bytes(world_size)) + PAGE_BYTES)


def slots_at(world_size: int) -> int:
    return round_up(PAIRS_AT + PAIR_BYTES * world_size, PAGE_BYTES)


@functools.lru_cache(maxsize=4096)
def digest_of(call: str) -> int:
    """63 bits of a hash of a call; ranks compare these instead of the words."""
    return int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little") >> 1


class ControlBlock:
    """The control blocks of all ranks of a channel, as one rank sees them: it writes its own and reads the others.

    `blocks[i]` is the place of rank i's block; `life_fds[i]` becomes readable when rank i dies. One thread at a time
    may use it, but any number may `wait`.
    """

    def __init__(
        self, segment: Segment, rank: int, blocks: Sequence[int], life_fds: Sequence[int], reporter: Reporter
    ) -> None:
        self.segment = segment
        self.rank = rank
        self.reporter = reporter
        self.world_size = len(blocks)
        self.blocks = blocks
        self.words = segment.words
        self.at = [place // 8 for place in blocks]  # index of the first word of each rank's block
        self.own = self.at[rank]
        self.peers = [peer for peer in range(self.world_size) if peer != rank]
        self.fence = futex.Fence()
        self.closed = False
        self.failure: BaseException | None = None  # with which this rank aborted the channel
        self.notes: StallNotes | None = None  # with which a wait whose time is up finds who is at fault
        self.probe: Probe | None = None  # told whom this rank waits for
        oversubscribed = self.world_size > len(os.sched_getaffinity(0))
        self.spins = 0 if oversubscribed else SPINS
        self._num_asleep, self._counting = 0, threading.Lock()
        self._theirs = [self.at[peer] for peer in self.peers]
        self._asleep = [self.at[peer] + ASLEEP for peer in self.peers]
        self.life_fds = list(life_fds)
        self._liveness = PidfdPoll({life_fds[peer]: peer for peer in self.peers})
        self._num_wakes = 0
        step = round_up(slot_bytes(self.world_size)) + PAGE_BYTES
        # A processor takes a load for a store to another page at the same offset, and waits; tensors often begin at
        # the start of a page, so slots do not, each at an offset of its own.
        self.slots = [
            [
                place + slots_at(self.world_size) + parity * step + 64 * ((7 + 11 * parity + 3 * peer) % 64)
                for peer, place in enumerate(blocks)
            ]
            for parity in (0, 1)
        ]

    # Publishing

    def publish(self, word: int, value: int) -> None:
        """Set one of this rank's words, after everything written before, and wake the peers that sleep."""
        if not futex.ORDERED_STORES:
            self.fence()
        self.words[self.own + word] = value
        self.wake_sleepers()

    def wake_sleepers(self) -> None:
        self.fence()  # the word is out before we look who sleeps; a sleeper says so before it looks at the word
        words = self.words
        for at in self._asleep:
            if words[at]:
                self._wake(at - ASLEEP)

    def wake_own(self) -> None:
        """Wake the threads of this rank that sleep: another one has done something for them."""
        self.fence()
        if self._num_asleep:
            self._wake(self.own)

    def _wake(self, block: int) -> None:
        # Values differ from rank to rank, so that the word changes even if two ranks write it at once.
        self._num_wakes = (self._num_wakes + 1) & 0xFFFFFF
        self.words[block + WAKE] = self._num_wakes << 8 | self.rank & 0xFF
        futex.wake(self.segment.address + 8 * (block + WAKE))

    def read(self, peer: int, word: int) -> int:
        return self.words[self.at[peer] + word]

    def any_below(self, word: int, value: int) -> bool:
        """Whether this rank must wait for some peer's word to reach `value`."""
        words = self.words
        for at in self._theirs:  # noqa: SIM110 (a generator takes three times as long)
            if words[at + word] < value:
                return True
        return False

    # Waiting

    def wait(
        self,
        missing: Callable[[], list[int]],
        operation: str,
        timeout: float,
        *,
        spin: bool,
        stuck: Callable[[int], bool] = lambda peer: False,
    ) -> None:
        """Return once no peer is `missing`. `stuck(peer)` tells whether this rank and `peer` wait for each
        other for ever.

        Without `spin` the rank sleeps at once: a thread that spins would hold the GIL while another computes.
        """
        if self.probe is not None:
            missing = self.probe.waiting(missing)
        if spin:
            for _ in range(self.spins):
                if not missing():
                    return
            give_up = time.monotonic() + YIELD_SECONDS
            for _ in range(YIELDS):
                if not missing():
                    return
                if time.monotonic() > give_up:
                    break
                os.sched_yield()
        if missing():
            self._sleep(missing, operation, timeout, stuck)

    def _sleep(
        self, missing: Callable[[], list[int]], operation: str, timeout: float, stuck: Callable[[int], bool]
    ) -> None:
        words, own = self.words, self.own
        wake_address = self.segment.address + 8 * (own + WAKE)
        deadline = WaitDeadline(self.reporter, operation, timeout, self.notes)
        nap = FIRST_NAP
        while True:
            self._count_asleep(1)
            try:
                seen = words[own + WAKE] & 0xFFFFFFFF
                self.fence()
                if missing():
                    futex.wait(wake_address, seen, min(nap, max(0.0, deadline.remaining)))
            finally:
                self._count_asleep(-1)
            self.fence()
            awaited = missing()
            if not awaited:
                deadline.end()
                return
            nap = min(2 * nap, LONGEST_NAP)
            if self.failure is not None:  # aborted by another thread
                raise self.reporter.aborted(self.failure, operation, deadline.waited)
            if self.closed:
                raise self.reporter.closed(operation)
            self._check_exited(missing, operation, deadline.waited)
            self._check_stuck(missing, operation, stuck)
            if deadline.remaining > 0:
                deadline.check(awaited)
            else:  # whoever sleeps in an exchange is not at fault, but whom it waits for
                guilty = at_fault(awaited, self._awaited_by, self.rank)
                are_stopped = all(process_state(self.life_fds[peer])[1] in STOPPED for peer in guilty)
                deadline.check(guilty, self._state_of(guilty), certain=are_stopped)

    def _count_asleep(self, change: int) -> None:
        with self._counting:
            self._num_asleep += change
            self.words[self.own + ASLEEP] = self._num_asleep

    def _awaited_by(self, peer: int) -> list[int]:
        awaits = self.read(peer, AWAITS) & 0x7FFF
        return [awaits - 1] if awaits else []

    def has_left(self, peer: int) -> bool:
        """Whether `peer` has closed, failed or died, so that nothing more comes from it."""
        return bool(self.read(peer, EXITED)) or peer in self._liveness.dead()

    def _check_exited(self, missing: Callable[[], list[int]], operation: str, waited: float) -> None:
        gone = {peer: self._exit_notice_of(peer) for peer in missing() if self.read(peer, EXITED)}
        dead = self._liveness.dead()
        self.fence()
        for peer in missing():  # again: whoever left may have done its part before
            if peer in gone:
                raise self.reporter.peer_exited(gone[peer], peer, operation, waited)
            if peer in dead:
                # It may have left word in its last moments, after we looked.
                if self.read(peer, EXITED):
                    raise self.reporter.peer_exited(self._exit_notice_of(peer), peer, operation, waited)
                raise self.reporter.lost(peer, operation)

    def _check_stuck(self, missing: Callable[[], list[int]], operation: str, stuck: Callable[[int], bool]) -> None:
        suspects = [peer for peer in missing() if stuck(peer)]
        self.fence()
        for peer in missing():
            if peer in suspects:
                entered = self.read(peer, ENTERED)
                called = f"collective #{entered}" if entered > self.read(self.rank, ENTERED) else "an exchange"
                calls = {
                    self.rank: f"{operation}, waiting for rank {self.reporter.world_rank(peer)}",
                    peer: f"{called}, waiting for rank {self.reporter.own}",
                }
                raise self.reporter.mismatch(operation, calls)

    def _state_of(self, awaited: Sequence[int]) -> str:
        """Describe what is known of the peers that this rank waits for, as sentences."""
        stories = []
        for peer in awaited:
            story = f"Rank {self.reporter.world_rank(peer)} last entered #{self.read(peer, ENTERED)}"
            pid, state = process_state(self.life_fds[peer])
            if state in STOPPED:
                story += f"; its process (pid {pid}) is stopped"
            elif state:
                story += f"; its process (pid {pid}) is alive"
            stories.append(story + ".")
        return " ".join(stories)

    # Texts

    def announce_exit(self, notice: ExitNotice) -> None:
        """Write why this rank can no longer be waited for; a second notice is ignored."""
        if self.words[self.own + EXITED]:
            return
        text = notice.to_bytes(EXIT_NOTICE_BYTES)
        self._write(EXIT_NOTICE_AT, text)
        self.publish(EXITED, len(text))

    def leave(self, notice: ExitNotice) -> None:
        """Announce the exit, and tell every rank that this one will not look at its block again."""
        self.announce_exit(notice)
        self.fence()
        for place in self.blocks:
            self.segment.bytes[place + GONE_AT + self.rank] = 1

    def is_deserted(self) -> bool:
        """Whether no rank will look at this rank's block, or at what it staged, again."""
        place = self.blocks[self.rank] + GONE_AT
        return bool(self.segment.bytes[place : place + self.world_size].all())

    def _exit_notice_of(self, peer: int) -> ExitNotice:
        notice = ExitNotice.from_bytes(self._read(peer, EXIT_NOTICE_AT, self.read(peer, EXITED)))
        # Whoever lost control of its memory may have left anything there.
        return notice or ExitNotice(self.reporter.world_rank(peer), DIED, "lost", self.reporter.own)

    def tell_call(self, number: int, call: str) -> None:
        """Say in words what this rank called, for the table of a mismatch."""
        text = call.encode()[: CALL_BYTES - 8]
        self._write(CALL_AT, struct.pack("q", len(text)) + text)
        self.publish(CALLED, number)

    def told_call(self, peer: int) -> str:
        (length,) = struct.unpack("q", self._read(peer, CALL_AT, 8))
        return self._read(peer, CALL_AT + 8, length).decode(errors="replace")

    def _write(self, at: int, data: bytes) -> None:
        place = self.blocks[self.rank] + at
        self.segment.memory[place : place + len(data)] = data

    def _read(self, peer: int, at: int, length: int) -> bytes:
        place = self.blocks[peer] + at
        return bytes(self.segment.memory[place : place + length])


class SegmentNotes:
    """The stall notes of a world whose ranks share one segment, in the words of its first channel."""

    def __init__(self, block: ControlBlock) -> None:
        self._words, self._at, self._own = block.words, block.at, block.own

    def tell(self, awaited: Sequence[int]) -> None:
        note = int(time.monotonic()) << 16 | awaited[0] + 1 if awaited else 0  # of several, one leads on
        self._words[self._own + STALLED] = note

    def awaited_by(self, rank: int) -> Sequence[int]:
        told, awaited = divmod(int(self._words[self._at[rank] + STALLED]), 1 << 16)
        return [awaited - 1] if 0 < awaited <= len(self._at) and is_recent(told, time.monotonic()) else ()
