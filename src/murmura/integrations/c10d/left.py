"""What a process group has after it was destroyed: its place, and errors that say that it is closed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.transports.base import Pairs, Transport
from murmura.transports.tagged_messages import Message, Receive, TaggedMessages


class LeftTransport(Transport):
    """Stands for a transport that was closed, of which it keeps nothing but its place and its name."""

    def __init__(self, left: Transport) -> None:
        super().__init__(
            left.rank,
            left.world_size,
            hosts=left.hosts,
            timeout=left.timeout,
            name=left.name,
            world_ranks=left.world_ranks,
        )
        self.num_collectives = left.num_collectives
        self.closed = True

    def do_exchange(self, sends: Pairs, recvs: Pairs, timeout: float | None) -> None:
        raise AssertionError("a transport that is closed runs no operation")

    def split(self, name: str, ranks: Sequence[int] | None = None) -> Transport | None:
        self.check_usable("split")
        return None


class LeftMessages(TaggedMessages):
    """Stands for the messages of such a transport."""

    def post_send(self, tensor: Tensor, dst: int, tag: int) -> Message:
        raise AssertionError("a transport that is closed sends nothing")

    def post_recv(self, receive: Receive) -> Message:
        raise AssertionError("a transport that is closed receives nothing")

    def close(self) -> None:
        return
