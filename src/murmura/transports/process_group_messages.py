"""Tagged messages over a process group, which has tags and receives from any source itself."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from murmura.collectives.deadline import Deadline
from murmura.transports.checks import check_timeout, flatten
from murmura.transports.checks import store as bring_back
from murmura.transports.tagged_messages import Arrival, Inbox, Message, Receive, SentMessage, TaggedMessages, fill

if TYPE_CHECKING:
    from murmura.transports.process_group import ProcessGroupTransport


class ProcessGroupMessages(TaggedMessages):
    """See the module. `channel` is a group of its own, which it owns."""

    channel: ProcessGroupTransport

    def __init__(self, channel: ProcessGroupTransport) -> None:
        super().__init__(channel)
        self._inbox = Inbox()  # of messages to itself, which a group does not take
        self._in_flight: list[Any] = []  # works of sends: one that is dropped before it is received sends nothing

    def post_send(self, tensor: Tensor, dst: int, tag: int) -> Message:
        flat = flatten(tensor, self.channel.device)
        if dst == self.rank:
            copy = flat.clone()
            self._inbox.arrive(Arrival(dst, tag, flat.nbytes, lambda out: fill(out, copy.view(torch.uint8))))
            self._inbox.match()
            return SentMessage(dst)
        # A copy, so that the sender waits for nobody who has not come to receive it.
        copy = flat.clone() if flat.data_ptr() == tensor.data_ptr() else flat
        work = self.channel._group.send([copy.view(torch.uint8)], dst, tag)
        self._in_flight = [each for each in self._in_flight if not each.is_completed()] + [work]
        return _GroupMessage(self, work, copy, None, [dst])

    def post_recv(self, receive: Receive) -> Message:
        out, src, tag = receive.out, receive.source, receive.tag
        if src == self.rank:
            self._inbox.post(receive)
            return _OwnMessage(receive)
        flat = flatten(out, self.channel.device, load=False)
        raw, group = [flat.view(torch.uint8)], self.channel._group
        work = group.recv_anysource(raw, tag) if src is None else group.recv(raw, src, tag)
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        return _GroupMessage(self, work, flat, out, peers if src is None else [src])

    def close(self) -> None:
        self.channel.close()


class _GroupMessage(Message):
    def __init__(
        self, messages: ProcessGroupMessages, work: Any, flat: Tensor, out: Tensor | None, awaited: list[int]
    ) -> None:
        self._channel, self._work, self._flat, self._out = messages.channel, work, flat, out
        self._awaited = awaited
        self._ended = False

    def done(self) -> bool:
        return self._ended or bool(self._work.is_completed())

    def wait(self, timeout: float | None = None) -> None:
        check_timeout(timeout)
        if self._ended or self._out is None:  # what is sent is a copy, which the group holds until it is received
            return
        channel = self._channel
        deadline = Deadline(channel.seconds(timeout))
        channel._awaited = self._awaited
        channel.operation = channel._call = f"recv from {'any rank' if len(self._awaited) > 1 else self._awaited[0]}"
        with channel._translated(deadline):
            self._work.wait(timedelta(seconds=deadline.timeout))
        self._ended = True
        self.source = self._work._source_rank()
        bring_back(self._flat, self._out)


class _OwnMessage(Message):
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.source = receive.source if receive.source is not None else -1

    def done(self) -> bool:
        return self._receive.ended

    def wait(self, timeout: float | None = None) -> None:
        if self._receive.error is not None:
            raise self._receive.error
        assert self._receive.ended, "a rank that receives from itself must send first"
