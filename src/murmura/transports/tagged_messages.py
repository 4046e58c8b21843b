"""Tagged messages: point to point, outside the order of the collectives, matched by source and tag.

`Transport.tagged_messages` makes them, on all ranks. Messages from one rank with one tag are received in the order in
which they were sent; those with another tag, or from another rank, may be received before or after them. A send
copies its tensor, so it waits for nobody unless a great deal has been sent and not received. A receive makes progress
whenever this rank waits for one, or asks whether one is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from murmura.errors import UsageError
from murmura.transports.checks import bring_back, check_dense, check_rank, check_timeout, check_writable, flatten
from murmura.transports.error_reporter import Reporter

if TYPE_CHECKING:
    from murmura.transports.endpoint import Endpoint


class Message(ABC):
    """A message being sent or received; `source` is the rank that sent it, -1 as long as that is not known."""

    source: int = -1

    @abstractmethod
    def done(self) -> bool:
        """Whether it has been sent or received, or has failed; never blocks."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Return when the tensor may be used; raise what became of the message otherwise."""


class SentMessage(Message):
    """A message whose tensor was copied, so that its sender waits for nobody."""

    def __init__(self, sender: int) -> None:
        self.source = sender

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        check_timeout(timeout)


class TaggedMessages(ABC):
    """The tagged messages of one rank; any thread may use them. `channel`, whose deadline they have, is theirs."""

    def __init__(self, channel: Endpoint) -> None:
        self.channel = channel
        self.rank = channel.rank
        self.world_size = channel.world_size

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Message:
        """Send `tensor` to rank `dst`, which may be this one. The tensor is the caller's again after ``wait``."""
        check_rank(dst, self.world_size, "dst")
        check_dense(tensor)
        self.channel.check_usable(f"send(dst={self.channel.reporter.world_rank(dst)})")
        return self.post_send(tensor, dst, tag)

    def irecv(self, out: Tensor, src: int | None = None, tag: int = 0) -> Message:
        """Receive into `out` the next message with `tag` from rank `src`, or from any rank if that is None."""
        if src is not None:
            check_rank(src, self.world_size, "src")
        check_writable(out, "out")
        receive = Receive(out.detach(), src, tag, self.channel.reporter)
        self.channel.check_usable(receive.operation)
        return self.post_recv(receive)

    @abstractmethod
    def post_send(self, tensor: Tensor, dst: int, tag: int) -> Message: ...

    @abstractmethod
    def post_recv(self, receive: Receive) -> Message: ...

    @abstractmethod
    def close(self) -> None:
        """Leave; what has been sent can still be received."""


@dataclass
class Arrival:
    """A message that has come and that nobody has received yet; `deliver` copies it to a flat tensor.

    `release` is called once, when it has been delivered or refused, and frees what it takes.
    """

    source: int
    tag: int
    num_bytes: int
    deliver: Callable[[Tensor], None]
    release: Callable[[], None] = lambda: None


@dataclass
class Receive:
    """A receive that was posted; `error` says why it failed."""

    out: Tensor
    source: int | None
    tag: int
    reporter: Reporter
    arrived_from: int = -1
    error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self.arrived_from >= 0 or self.error is not None

    @property
    def operation(self) -> str:
        """What errors call it."""
        src = "any" if self.source is None else self.reporter.world_rank(self.source)
        return f"recv(src={src}, tag={self.tag})"

    def take(self, arrival: Arrival) -> None:
        try:
            if arrival.num_bytes != self.out.nbytes:
                raise UsageError(
                    f"rank {self.reporter.own} in {self.operation}: a message of {arrival.num_bytes} bytes came from "
                    f"rank {self.reporter.world_rank(arrival.source)}, but the tensor to receive it has "
                    f"{self.out.nbytes}. Both must be of one size."
                )
            flat = flatten(self.out, self.out.device, load=False)
            arrival.deliver(flat)
            bring_back(flat, self.out)
            self.arrived_from = arrival.source
        except Exception as error:  # carried to whoever waits for it, which need not be this thread
            self.error = error
        finally:
            arrival.release()


@dataclass
class Inbox:
    """What has come to a rank, and what it has asked for, matched in the order of both. The caller locks it."""

    _arrived: dict[int, deque[Arrival]] = field(default_factory=dict)
    _posted: list[Receive] = field(default_factory=list)

    def arrive(self, arrival: Arrival) -> None:
        self._arrived.setdefault(arrival.source, deque()).append(arrival)

    def post(self, receive: Receive) -> None:
        self._posted.append(receive)
        self.match()

    def match(self) -> None:
        """Hand what has come to the receives that ask for it."""
        if any(self._arrived.values()):
            self._posted = [receive for receive in self._posted if not self._serve(receive)]

    def _serve(self, receive: Receive) -> bool:
        sources = list(self._arrived) if receive.source is None else [receive.source]
        for source in sources:
            queue = self._arrived.get(source, deque())
            for arrival in queue:
                if arrival.tag == receive.tag:
                    queue.remove(arrival)
                    receive.take(arrival)
                    return True
        return False


def fill(flat: Tensor, raw: Tensor) -> None:
    """Copy the bytes `raw` to a flat tensor of any dtype."""
    flat.view(torch.uint8).copy_(raw)
