"""Tagged messages: point to point, outside the order of the collectives, matched by source and tag.

`Transport.tagged_messages` makes them, on all ranks. Messages from one rank with one tag are received in the order in
which they were sent; those with another tag, or from another rank, may be received before or after them. A send
copies its tensor, so it waits for nobody unless a great deal has been sent and not received. A receive makes progress
whenever this rank waits for one, or asks whether one is done.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from murmura.errors import UsageError
from murmura.transports.checks import check_dense, check_rank, check_timeout, check_writable, flatten, store


class Message(ABC):
    """A message being sent or received; `source` is the rank that sent it, -1 as long as that is not known."""

    source: int = -1

    @abstractmethod
    def done(self) -> bool:
        """Whether it has been sent or received, or has failed; never blocks."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Return when the tensor may be used; raise what became of the message otherwise."""


class TaggedMessages(ABC):
    """The tagged messages of one rank; any thread may use them."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Message:
        """Send `tensor` to rank `dst`, which may be this one. The tensor is the caller's again after ``wait``."""
        check_rank(dst, self.world_size, "dst")
        check_dense(tensor)
        return self.post_send(tensor, dst, tag)

    def irecv(self, out: Tensor, src: int | None = None, tag: int = 0) -> Message:
        """Receive into `out` the next message with `tag` from rank `src`, or from any rank if that is None."""
        if src is not None:
            check_rank(src, self.world_size, "src")
        check_writable(out)
        return self.post_recv(out, src, tag)

    @abstractmethod
    def post_send(self, tensor: Tensor, dst: int, tag: int) -> Message: ...

    @abstractmethod
    def post_recv(self, out: Tensor, src: int | None, tag: int) -> Message: ...

    @abstractmethod
    def close(self) -> None:
        """Leave; what has been sent can still be received."""


@dataclass
class Arrival:
    """A message that has come and that nobody has received yet; `deliver` copies it to a flat tensor."""

    source: int
    tag: int
    num_bytes: int
    deliver: Callable[[Tensor], None]


@dataclass
class Receive:
    """A receive that was posted; `error` says why it failed."""

    out: Tensor
    source: int | None
    tag: int
    arrived_from: int = -1
    error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self.arrived_from >= 0 or self.error is not None

    def take(self, arrival: Arrival) -> None:
        if arrival.num_bytes != self.out.nbytes:
            self.error = UsageError(
                f"a message of {arrival.num_bytes} bytes came from rank {arrival.source} with tag {self.tag}, but the "
                f"tensor to receive it has {self.out.nbytes}. Both must be of one size."
            )
            return
        flat = flatten(self.out, self.out.device, load=False)
        arrival.deliver(flat)
        store(flat, self.out)
        self.arrived_from = arrival.source


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


class Progress:
    """How long a call may still wait."""

    def __init__(self, timeout: float | None, default: float) -> None:
        check_timeout(timeout)
        self.seconds = default if timeout is None else timeout
        self._until = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        return max(0.001, self._until - time.monotonic())
