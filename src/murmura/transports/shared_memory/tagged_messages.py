"""Tagged messages through shared memory: a ring of descriptors for each ordered pair of ranks.

The sender copies its tensor to a buffer in its arena and publishes a descriptor: number, tag, bytes, place. The
receiver pulls the bytes and acknowledges the number, after which descriptor and buffer are free again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from murmura.transports.checks import flatten
from murmura.transports.shared_memory.control_block import EXITED
from murmura.transports.shared_memory.segment import Segment
from murmura.transports.tagged_messages import Arrival, Inbox, Message, Progress, Receive, TaggedMessages

if TYPE_CHECKING:
    from murmura.transports.shared_memory.transport import SharedMemoryTransport

SLOTS = 256  # messages to one rank that have not been received
RING_WORDS = SLOTS * 8 + SLOTS  # descriptors of eight words, then acknowledgements
NUMBER, TAG, NUM_BYTES, PLACE = range(4)  # words of a descriptor
BUFFERED_BYTES = 256 * 2**20  # to one rank and not received; beyond them a send waits
POOLED_BYTES = 128 * 2**20  # of free buffers that are kept
TURN_SECONDS = 0.05  # between two looks of a thread at what another one has received for it


class _Buffers:
    """Buffers in this rank's arena, by powers of two; free ones are kept, because new pages are slow."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._free: dict[int, list[int]] = {}
        self._free_bytes = 0
        self._size_of: dict[int, int] = {}

    def take(self, num_bytes: int) -> int:
        size = max(4096, 1 << (num_bytes - 1).bit_length()) if num_bytes else 4096
        free = self._free.get(size)
        if free:
            self._free_bytes -= size
            return free.pop()
        place = self._segment.take(size)
        self._size_of[place] = size
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


class SharedMemoryMessages(TaggedMessages):
    """See the module. `channel` is a channel of its own, which it owns."""

    def __init__(self, channel: SharedMemoryTransport) -> None:
        super().__init__(channel.rank, channel.world_size)
        self._channel, self._control, self._segment = channel, channel._control, channel._segment
        self._buffers = _Buffers(self._segment)
        self._inbox = Inbox()
        self._sending, self._receiving = threading.Lock(), threading.RLock()
        self._peers = self._control.peers
        self._num_sent = [0] * self.world_size
        self._num_seen = [0] * self.world_size
        self._in_flight: list[deque[tuple[int, int, int]]] = [deque() for _ in range(self.world_size)]
        self._bytes_in_flight = [0] * self.world_size
        num_bytes = 8 * RING_WORDS * self.world_size
        self._area = self._segment.take(num_bytes)
        self._segment.bytes[self._area : self._area + num_bytes] = 0
        places = channel.all_gather(torch.tensor([self._area]))
        self._at = [int(place) // 8 for place in places]

    # Sending

    def post_send(self, tensor: Tensor, dst: int, tag: int) -> Message:
        self._channel.check_usable(f"send(dst={dst})")
        raw = flatten(tensor, self._channel.device).view(torch.uint8).numpy()
        if dst == self.rank:
            copy = torch.from_numpy(raw.copy())
            with self._receiving:
                self._inbox.arrive(Arrival(dst, tag, len(raw), lambda flat: _fill(flat, copy)))
                self._inbox.match()
            return _Sent(self, dst, 0)
        with self._sending:
            self._free_received(dst)
            if len(self._in_flight[dst]) == SLOTS:
                self._await_received(dst, self._num_sent[dst] - SLOTS + 1, None)
            number = self._num_sent[dst] = self._num_sent[dst] + 1
            place = self._buffers.take(len(raw))
            self._segment.bytes[place : place + len(raw)] = raw
            self._in_flight[dst].append((number, place, len(raw)))
            self._bytes_in_flight[dst] += len(raw)
            words, at = self._control.words, self._at[self.rank] + dst * RING_WORDS + number % SLOTS * 8
            words[at + TAG], words[at + NUM_BYTES], words[at + PLACE] = tag, len(raw), place
            self._control.fence()
            words[at + NUMBER] = number
            self._control.wake_sleepers()
        return _Sent(self, dst, number)

    def _free_received(self, dst: int) -> None:
        acknowledged, queue = self._at[dst] + self.rank * RING_WORDS + SLOTS * 8, self._in_flight[dst]
        words = self._control.words
        while queue and words[acknowledged + queue[0][0] % SLOTS] == queue[0][0]:
            _, place, num_bytes = queue.popleft()
            self._bytes_in_flight[dst] -= num_bytes
            self._buffers.give_back(place)

    def _is_free(self, dst: int, number: int) -> bool:
        """Whether the sender of message `number` need not wait any more."""
        if self._bytes_in_flight[dst] > BUFFERED_BYTES:
            with self._sending:
                self._free_received(dst)
        queue = self._in_flight[dst]
        return self._bytes_in_flight[dst] <= BUFFERED_BYTES or not queue or queue[0][0] > number

    def _await_received(self, dst: int, number: int, timeout: float | None) -> None:
        """Wait, holding the lock of the senders, until `dst` has received everything up to `number`."""
        progress = Progress(timeout, self._channel.timeout)
        operation = f"send(dst={self._channel.reporter.world_rank(dst)})"

        def awaited() -> list[int]:
            self._free_received(dst)
            queue = self._in_flight[dst]
            return [dst] if queue and queue[0][0] <= number else []

        def missing() -> list[int]:
            self._progress()
            return awaited()

        while awaited():
            if self._receiving.acquire(timeout=TURN_SECONDS):
                try:
                    self._wait(missing, operation, progress.left)
                finally:
                    self._receiving.release()

    # Receiving

    def post_recv(self, out: Tensor, src: int | None, tag: int) -> Message:
        self._channel.check_usable("recv")
        receive = Receive(out.detach(), src, tag)
        with self._receiving:
            self._inbox.post(receive)
        return _Received(self, receive)

    def _progress(self) -> None:
        """Look at all rings, and receive what was asked for."""
        words = self._control.words
        came = False
        for peer in self._peers:
            ring = self._at[peer] + self.rank * RING_WORDS
            while True:
                number = self._num_seen[peer] + 1
                at = ring + number % SLOTS * 8
                if words[at + NUMBER] != number:
                    break
                self._control.fence()
                self._num_seen[peer] = number
                tag, num_bytes, place = words[at + TAG], words[at + NUM_BYTES], words[at + PLACE]
                self._inbox.arrive(self._arrival(peer, number, tag, num_bytes, place))
                came = True
        if came:
            self._inbox.match()

    def _arrival(self, peer: int, number: int, tag: int, num_bytes: int, place: int) -> Arrival:
        def deliver(flat: Tensor) -> None:
            flat.view(torch.uint8).numpy()[:] = self._segment.bytes[place : place + num_bytes]
            self._control.fence()
            self._control.words[self._at[self.rank] + peer * RING_WORDS + SLOTS * 8 + number % SLOTS] = number
            self._control.wake_sleepers()

        return Arrival(peer, tag, num_bytes, deliver)

    def is_received(self, receive: Receive) -> bool:
        if not receive.ended and self._receiving.acquire(False):
            try:
                self._progress()
            finally:
                self._receiving.release()
        return receive.ended

    def await_receive(self, receive: Receive, timeout: float | None) -> None:
        progress = Progress(timeout, self._channel.timeout)

        def missing() -> list[int]:
            self._progress()
            if receive.ended:
                return []
            if receive.source is not None:
                return [] if receive.source == self.rank else [receive.source]
            present = [peer for peer in self._peers if not self._control.read(peer, EXITED)]
            return present or self._peers

        src = "any" if receive.source is None else self._channel.reporter.world_rank(receive.source)
        operation = f"recv(src={src}, tag={receive.tag})"
        while not receive.ended:
            if self._receiving.acquire(timeout=TURN_SECONDS):
                try:
                    self._wait(missing, operation, progress.left)
                finally:
                    self._receiving.release()
                if not receive.ended:  # from this rank itself, which has not sent it
                    raise self._channel.reporter.timed_out([self.rank], operation, progress.seconds)
        if receive.error is not None:
            raise receive.error

    def _wait(self, missing: Callable[[], list[int]], operation: str, timeout: float) -> None:
        channel = self._channel
        try:
            self._control.wait(missing, operation, timeout, spin=channel._may_spin())
        except BaseException as error:
            channel.abort(error)
            raise

    def close(self) -> None:
        if not self._channel.closed:
            # First in the list, because the channel's own block tells whether its peers have left, too.
            self._segment.retire(self._control.is_deserted, [self._area, *self._buffers.places])
            self._channel.close()


class _Sent(Message):
    def __init__(self, messages: SharedMemoryMessages, dst: int, number: int) -> None:
        self.source = messages.rank
        self._messages, self._dst, self._number = messages, dst, number

    def done(self) -> bool:
        return self._messages._is_free(self._dst, self._number)

    def wait(self, timeout: float | None = None) -> None:
        messages = self._messages
        if not messages._is_free(self._dst, self._number):
            with messages._sending:
                messages._await_received(self._dst, self._number, timeout)


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


def _fill(flat: Tensor, raw: Tensor) -> None:
    flat.view(torch.uint8).copy_(raw)
