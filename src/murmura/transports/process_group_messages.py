"""Tagged messages over a Gloo group, which has tags and receives from any source itself.

Gloo tells that a message has ended only to whoever waits for it, and a wait whose time is up closes all connections.
So threads wait for the messages, one for each peer and tag, whose messages end in the order in which they were posted.
A program waits for these threads, as long as it likes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from murmura.errors import PeerTimeout, UsageError
from murmura.transports.checks import bring_back, check_timeout, flatten
from murmura.transports.program_end import END_SECONDS, has_raised, reason_of_end
from murmura.transports.stalls import WaitDeadline
from murmura.transports.tagged_messages import Arrival, Inbox, Message, Receive, SentMessage, TaggedMessages, fill

if TYPE_CHECKING:
    from murmura.transports.endpoint import Endpoint
    from murmura.transports.process_group import ProcessGroupTransport

FOREVER = timedelta(days=1000)  # for a thread, which ends with the connections
IDLE_SECONDS = 0.2  # after which a thread without messages ends
TURN_SECONDS = 0.1  # between two looks of a program that waits at whether the channel still stands
SENDING_SECONDS = 2.0  # for peers to receive what was sent, before this rank leaves or its process ends


@dataclass
class _Posted:
    """A message that the group has been given."""

    work: Any  # None when it has ended; one that is dropped before sends nothing
    tensor: Tensor
    ended: bool = False
    source: int = -1
    error: Exception | None = None


@dataclass(frozen=True)
class _Stream:
    """Messages that end in the order in which they were posted."""

    sends: bool
    peer: int | None  # None for any
    tag: int


class Streams:
    """The messages that have not ended; it knows no transport, so its threads keep none alive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.closed = False
        self._posted: dict[_Stream, deque[_Posted]] = {}

    def post(self, stream: _Stream, posted: _Posted) -> None:
        """Wait for `posted` after those of its stream; the caller holds the lock since it gave it to the group."""
        queue = self._posted.get(stream)
        if queue is None:
            queue = self._posted[stream] = deque()
            name = f"murmura-messages-{stream.peer}-{stream.tag}"
            threading.Thread(target=self._serve, args=(stream, queue), name=name, daemon=True).start()
        queue.append(posted)
        self.changed.notify_all()

    def in_flight(self, *, sends: bool) -> int:
        """How many sends, or else receives, have not ended."""
        with self.changed:
            return sum(len(queue) for stream, queue in self._posted.items() if stream.sends == sends)

    def end_with_program(self, channel: Endpoint) -> None:
        """The program ends and nobody closed this: end the waits of the threads, after sends had their time."""
        with self.changed:
            if not has_raised():
                self.changed.wait_for(lambda: not self.in_flight(sends=True), SENDING_SECONDS)
            in_flight = any(self._posted.values())
        if in_flight:
            channel.abort(reason_of_end(channel.reporter, "a message that nobody waited for"))
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._posted, END_SECONDS)

    def _serve(self, stream: _Stream, queue: deque[_Posted]) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: queue or self.closed, IDLE_SECONDS)
                if not queue:
                    del self._posted[stream]
                    self.changed.notify_all()
                    return
                posted = queue[0]
            try:
                posted.work.wait(FOREVER)
                if not stream.sends:
                    posted.source = posted.work._source_rank()
            except Exception as error:  # carried to whoever waits for it
                posted.error = error
            with self.changed:
                queue.popleft()
                posted.work, posted.ended = None, True
                self.changed.notify_all()
            del posted


def _end_with_program(streams: weakref.ref[Streams], channel: weakref.ref[Endpoint]) -> None:
    still, open_channel = streams(), channel()
    if still is not None and open_channel is not None and not open_channel.closed:
        still.end_with_program(open_channel)


class ProcessGroupMessages(TaggedMessages):
    """See the module. `channel` is a group of its own, which it owns."""

    channel: ProcessGroupTransport

    def __init__(self, channel: ProcessGroupTransport) -> None:
        super().__init__(channel)
        self._streams = channel.streams = Streams()
        weakref.finalize(self._streams, _end_with_program, weakref.ref(self._streams), weakref.ref(channel))
        self._changed = self._streams.changed
        self._inbox = Inbox()  # of messages to itself, which a group does not take; under the same lock
        self._peers = [peer for peer in range(self.world_size) if peer != self.rank]

    @classmethod
    def split_off(cls, transport: ProcessGroupTransport) -> ProcessGroupMessages:
        if transport.device.type != "cpu":
            raise UsageError(
                f"rank {transport.reporter.own}: NCCL ignores tags, so it has no tagged messages. Use exchange, or a "
                "transport of the kind gloo beside it."
            )
        channel = transport.split("tagged messages")
        assert channel is not None  # every rank is a member
        return cls(channel)

    def post_send(self, tensor: Tensor, dst: int, tag: int) -> Message:
        flat = flatten(tensor, self.channel.device)
        # A copy, so that the sender waits for nobody who has not come to receive it.
        copy = (flat.clone() if flat.data_ptr() == tensor.data_ptr() else flat).view(torch.uint8)
        if dst == self.rank:
            with self._changed:
                self._inbox.arrive(Arrival(dst, tag, copy.nbytes, lambda out: fill(out, copy)))
                self._inbox.match()
                self._changed.notify_all()
            return SentMessage(dst)
        try:
            with self._changed:
                work = self.channel._group.send([copy], dst, tag)
                self._streams.post(_Stream(True, dst, tag), _Posted(work, copy))
        except RuntimeError as error:  # the connection is broken
            operation = f"send(dst={self.channel.reporter.world_rank(dst)})"
            raise self.channel._explain_call(error, operation, operation, [dst], 0.0) from error
        return SentMessage(self.rank)

    def post_recv(self, receive: Receive) -> Message:
        src, tag, group = receive.source, receive.tag, self.channel._group
        if src == self.rank:
            with self._changed:
                self._inbox.post(receive)
            return _Received(self, receive, None, [src])
        flat = flatten(receive.out, self.channel.device, load=False)
        raw = [flat.view(torch.uint8)]
        posted = _Posted(None, flat)
        with self._changed:
            try:
                posted.work = group.recv_anysource(raw, tag) if src is None else group.recv(raw, src, tag)
                self._streams.post(_Stream(False, src, tag), posted)
            except RuntimeError as error:  # the connection is broken, as whoever waits will learn
                posted.ended, posted.error = True, error
        return _Received(self, receive, posted, self._peers if src is None else [src])

    def close(self) -> None:
        if self.channel.closed:
            return
        with self._changed:
            if not self.channel.failed:
                self._changed.wait_for(lambda: not self._streams.in_flight(sends=True), SENDING_SECONDS)
        self.channel.close()
        with self._changed:
            self._streams.closed = True
            self._changed.notify_all()


class _Received(Message):
    """A receive; `posted` is None if it is from this rank itself."""

    def __init__(
        self, messages: ProcessGroupMessages, receive: Receive, posted: _Posted | None, awaited: Sequence[int]
    ) -> None:
        self._channel, self._changed = messages.channel, messages._changed
        self._receive, self._posted, self._awaited = receive, posted, awaited

    @property
    def source(self) -> int:  # type: ignore[override]
        return self._receive.arrived_from

    def done(self) -> bool:
        with self._changed:
            return self._settle() or self._channel.failed or self._channel.closed

    def wait(self, timeout: float | None = None) -> None:
        check_timeout(timeout)
        channel, receive = self._channel, self._receive
        deadline = WaitDeadline(channel.reporter, receive.operation, channel.seconds(timeout))
        with self._changed:
            while not (self._settle() or channel.failed or channel.closed or deadline.remaining <= 0):
                with contextlib.suppress(PeerTimeout):  # if its time is up at this very moment
                    deadline.check(self._awaited)  # which warns
                self._changed.wait(max(0.001, min(TURN_SECONDS, deadline.remaining)))
        if receive.arrived_from >= 0:
            return
        if isinstance(receive.error, UsageError):  # a message of another size, which has been received
            raise receive.error
        error = self._explain(deadline)
        channel.abort(error)
        raise error from receive.error

    def _settle(self) -> bool:
        """Whether it has ended; the tensor then holds the message, copied in the caller's CUDA stream."""
        receive, posted = self._receive, self._posted
        if not receive.ended and posted is not None and posted.ended:
            if posted.error is not None:
                receive.error = posted.error
            else:
                bring_back(posted.tensor, receive.out)
                receive.arrived_from = posted.source
        return receive.ended

    def _explain(self, deadline: WaitDeadline) -> BaseException:
        channel, operation, waited = self._channel, self._receive.operation, deadline.waited
        if channel.failure is not None:  # aborted meanwhile, or closed, which is the cause
            return channel.reporter.aborted(channel.failure, operation, waited)
        if channel.closed:
            return channel.reporter.closed(operation)
        fault = self._receive.error or TimeoutError(f"timed out after {deadline.timeout:.1f} s.")
        assert isinstance(fault, Exception)
        return channel._explain_call(fault, operation, operation, self._awaited, waited)
