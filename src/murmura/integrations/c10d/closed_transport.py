"""What a destroyed process group holds instead of its transport: operations raise an error that says it is closed.

torch keeps destroyed groups in caches and default arguments; a real transport would keep its memory and connections.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from murmura.transports.base import Pairs, Transport
from murmura.transports.tagged_messages import Message, Receive, TaggedMessages


class ClosedTransport(Transport):
    """Replaces a transport that was closed, and keeps only its rank, its name and its count of collectives."""

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


class ClosedMessages(TaggedMessages):
    """Replaces the tagged messages of such a transport."""

    def post_send(self, tensor: Tensor, dst: int, tag: int) -> Message:
        raise AssertionError("a transport that is closed sends nothing")

    def post_recv(self, receive: Receive) -> Message:
        raise AssertionError("a transport that is closed receives nothing")

    def close(self) -> None:
        return
