"""Tagged messages through shared memory: for each ordered pair of ranks a list of descriptors, which never is full.

The sender copies its tensor to a buffer in its arena and appends a descriptor to the last page of the list: tag, bytes,
place. The receiver reads descriptors in order, and pulls the bytes when they are asked for. It marks what it will not
look at again, a buffer whose bytes it has pulled or a page that it has read to its end, and the sender frees that.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from murmura.transports.checks import check_timeout, flatten
from murmura.transports.forks import guard
from murmura.transports.shared_memory.arena import PAGE_BYTES
from murmura.transports.shared_memory.control_block import EXITED
from murmura.transports.shared_memory.segment import Segment
from murmura.transports.tagged_messages import Arrival, Inbox, Message, Receive, SentMessage, TaggedMessages, fill

if TYPE_CHECKING:
    from murmura.transports.shared_memory.transport import SharedMemoryTransport

RELEASED, NEXT = (
    0,
    1,
)  # words of the header of a buffer: whether the receiver has done with it; of a page, its successor
HEADER_WORDS = 8
HEADER_BYTES = 8 * HEADER_WORDS
SMALLEST = PAGE_BYTES - HEADER_BYTES
TAG, NUM_BYTES, PLACE = range(3)  # words of a descriptor; it is complete when its place is not 0
DESCRIPTOR_WORDS = 4
SLOTS = SMALLEST // (8 * DESCRIPTOR_WORDS)  # descriptors in a page
BUFFERED_BYTES = 256 * 2**20  # to one rank and not received; beyond them a send waits
POOLED_BYTES = 128 * 2**20  # of free buffers that are kept
LOOKS = 4  # at buffers in flight, with every send: more than one, so that their number falls


class _Buffers:
    """Buffers in this rank's arena, by powers of two; free ones are kept, because new pages are slow."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._free: dict[int, list[int]] = {}
        self._free_bytes = 0
        self._size_of: dict[int, int] = {}

    def take(self, num_bytes: int) -> int:
        """The place of a buffer for so many bytes after its header."""
        size = SMALLEST if num_bytes <= SMALLEST else 1 << (num_bytes - 1).bit_length()
        free = self._free.get(size)
        if free:
            self._free_bytes -= size
            place = free.pop()
        else:
            place = self._segment.take(HEADER_BYTES + size)
            self._size_of[place] = size
        self._segment.words[place // 8 + RELEASED] = 0
        return place

    def take_page(self) -> int:
        place = self.take(SMALLEST)
        self._segment.bytes[place : place + PAGE_BYTES] = 0
        return place

    def give_back(self, place: int) -> None:
        size = self._size_of[place]
        if self._free_bytes + size > POOLED_BYTES:
            del self._size_of[place]
            self._segment.give_back(place)
            return
        self._free_bytes += size
        self._free.setdefault(size, []).append(place)

    @property
    def places(self) -> list[int]:
        return list(self._size_of)


@dataclass
class _InFlight:
    """A buffer or a page that the receiver has not released."""

    place: int  # -1 when it is free again
    num_bytes: int


@dataclass
class _Cursor:
    """Where a rank writes, or reads, the next descriptor."""

    page: int
    slot: int = 0


@dataclass
class _Outbox(_Cursor):
    """What was sent to one rank."""

    in_flight: deque[_InFlight] = field(default_factory=deque)
    num_bytes: int = 0  # in flight


class SharedMemoryMessages(TaggedMessages):
    """See the module. `channel` is a channel of its own, which it owns."""

    channel: SharedMemoryTransport

    def __init__(self, channel: SharedMemoryTransport) -> None:
        super().__init__(channel)
        self._control, self._segment = channel._control, channel._segment
        self._words, self._peers = self._control.words, self._control.peers
        self._buffers = _Buffers(self._segment)
        self._inbox = Inbox()
        # Nobody waits while holding one of these.
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        first_pages = [self._buffers.take_page() for _ in range(self.world_size)]
        self._outboxes = [_Outbox(page) for page in first_pages]
        pages = channel.all_gather(torch.tensor(first_pages))
        self._cursors = [_Cursor(int(theirs[self.rank])) for theirs in pages]
        guard(self)

    def after_fork(self) -> None:
        """In a forked child, which must leave to the parent what has come."""
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._peers = []

    # Sending

    def post_send(self, tensor: Tensor, dst: int, tag: int) -> Message:
        raw = flatten(tensor, self.channel.device).view(torch.uint8).numpy()
        if dst == self.rank:
            copy = torch.from_numpy(raw.copy())
            with self._receiving:
                self._inbox.arrive(Arrival(dst, tag, len(raw), lambda flat: fill(flat, copy)))
                self._inbox.match()
            self._control.wake_own()
            return SentMessage(dst)
        with self._sending:
            outbox = self._outboxes[dst]
            self._free_released(outbox, LOOKS)
            if outbox.slot == SLOTS:
                self._add_page(outbox)
            place = self._buffers.take(len(raw))
            start = place + HEADER_BYTES
            self._segment.bytes[start : start + len(raw)] = raw
            sent = _InFlight(place, max(len(raw), PAGE_BYTES))
            outbox.in_flight.append(sent)
            outbox.num_bytes += sent.num_bytes
            words, at = self._words, outbox.page // 8 + HEADER_WORDS + outbox.slot * DESCRIPTOR_WORDS
            words[at + TAG], words[at + NUM_BYTES] = tag, len(raw)
            self._control.fence()
            words[at + PLACE] = place
            outbox.slot += 1
            self._control.wake_sleepers()
        return _Sent(self, dst, sent)

    def _add_page(self, outbox: _Outbox) -> None:
        page, last = self._buffers.take_page(), outbox.page
        outbox.in_flight.append(_InFlight(last, 0))
        outbox.page, outbox.slot = page, 0
        self._control.fence()
        self._words[last // 8 + NEXT] = page

    def _free_released(self, outbox: _Outbox, looks: int) -> None:
        """Look at so many of the buffers in flight, each time at others, and free those that were released."""
        in_flight = outbox.in_flight
        for _ in range(min(looks, len(in_flight))):
            each = in_flight.popleft()
            if self._words[each.place // 8 + RELEASED]:
                outbox.num_bytes -= each.num_bytes
                self._buffers.give_back(each.place)
                each.place = -1
            else:
                in_flight.append(each)

    def is_sent(self, dst: int, sent: _InFlight) -> bool:
        """Whether whoever sent this need not wait any more."""
        outbox = self._outboxes[dst]
        if outbox.num_bytes > BUFFERED_BYTES:
            with self._sending:
                self._free_released(outbox, len(outbox.in_flight))
        return outbox.num_bytes <= BUFFERED_BYTES or sent.place < 0

    def await_sent(self, dst: int, sent: _InFlight, timeout: float | None) -> None:
        def missing() -> list[int]:
            self._progress()  # the peer may wait for this rank in the same way
            return [] if self.is_sent(dst, sent) else [dst]

        check_timeout(timeout)
        if not self.is_sent(dst, sent):
            self._wait(missing, f"send(dst={self.channel.reporter.world_rank(dst)})", timeout)

    # Receiving

    def post_recv(self, receive: Receive) -> Message:
        with self._receiving:
            self._inbox.post(receive)
        return _Received(self, receive)

    def _progress(self) -> None:
        with self._receiving:
            self._look()

    def _look(self) -> None:
        """Look for descriptors of all peers, holding the lock, and receive what was asked for."""
        words, came = self._words, False
        for peer in self._peers:
            cursor = self._cursors[peer]
            while True:
                if cursor.slot == SLOTS:
                    following = words[cursor.page // 8 + NEXT]
                    if not following:
                        break
                    self._release(cursor.page)
                    cursor.page, cursor.slot = following, 0
                at = cursor.page // 8 + HEADER_WORDS + cursor.slot * DESCRIPTOR_WORDS
                place = words[at + PLACE]
                if not place:
                    break
                self._control.fence()
                cursor.slot += 1
                self._inbox.arrive(self._arrival(peer, words[at + TAG], words[at + NUM_BYTES], place))
                came = True
        if came:
            self._inbox.match()

    def _arrival(self, peer: int, tag: int, num_bytes: int, place: int) -> Arrival:
        def deliver(flat: Tensor) -> None:
            start = place + HEADER_BYTES
            flat.view(torch.uint8).numpy()[:] = self._segment.bytes[start : start + num_bytes]

        def release() -> None:
            self._release(place)
            self._control.wake_sleepers()

        return Arrival(peer, tag, num_bytes, deliver, release)

    def _release(self, place: int) -> None:
        self._control.fence()
        self._words[place // 8 + RELEASED] = 1

    def is_received(self, receive: Receive) -> bool:
        """Whether it has ended, or nobody is left who could send what it waits for."""
        if receive.ended:
            return True
        is_over = self.channel.failed or self.channel.closed or self._have_left(receive.source)
        self._control.fence()
        if self._receiving.acquire(False):
            try:
                self._look()  # after that, for whoever has left may have sent it before
            finally:
                self._receiving.release()
        return receive.ended or is_over

    def _have_left(self, source: int | None) -> bool:
        """Whether `source`, or every peer if that is None, has left; this rank itself has not."""
        senders = self._peers if source is None else [source]
        return bool(senders) and source != self.rank and all(map(self._control.has_left, senders))

    def await_receive(self, receive: Receive, timeout: float | None) -> None:
        def missing() -> list[int]:
            self._progress()
            if receive.ended:
                return []
            if receive.source is not None:
                return [receive.source]
            present = [peer for peer in self._peers if not self._control.read(peer, EXITED)]
            return present or self._peers or [self.rank]

        check_timeout(timeout)
        if not receive.ended:
            self._wait(missing, receive.operation, timeout)
        if receive.error is not None:
            raise receive.error

    def _wait(self, missing: Callable[[], list[int]], operation: str, timeout: float | None) -> None:
        channel = self.channel
        if channel.forked:
            channel.check_usable(operation)
        try:
            self._control.wait(missing, operation, channel.seconds(timeout), spin=channel._may_spin())
        except BaseException as error:
            channel.abort(error)
            raise

    def close(self) -> None:
        if not self.channel.closed:
            # First in the list, because the channel's own block tells whether its peers have left, too.
            self._segment.retire(self._control.is_deserted, self._buffers.places)
            self.channel.close()


class _Sent(SentMessage):
    def __init__(self, messages: SharedMemoryMessages, dst: int, sent: _InFlight) -> None:
        super().__init__(messages.rank)
        self._messages, self._dst, self._sent = messages, dst, sent

    def done(self) -> bool:
        messages = self._messages
        if messages.is_sent(self._dst, self._sent) or messages.channel.failed or messages.channel.closed:
            return True
        return messages._control.has_left(self._dst)

    def wait(self, timeout: float | None = None) -> None:
        self._messages.await_sent(self._dst, self._sent, timeout)


class _Received(Message):
    def __init__(self, messages: SharedMemoryMessages, receive: Receive) -> None:
        self._messages, self._receive = messages, receive

    @property
    def source(self) -> int:  # type: ignore[override]
        return self._receive.arrived_from

    def done(self) -> bool:
        return self._messages.is_received(self._receive)

    def wait(self, timeout: float | None = None) -> None:
        self._messages.await_receive(self._receive, timeout)
