"""What collectives need of a transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


class PointToPoint(Protocol):
    """A rank, a number of ranks, and one exchange.

    `exchange` sends each tensor of `sends` to its rank and fills each tensor of `recvs` from its rank, all at
    once, and returns when every one of them is done. Between two ranks messages arrive in the order they were sent.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], *, timeout: float | None = None
    ) -> object: ...


@runtime_checkable
class Streaming(Protocol):
    """A transport that delivers a long message in parts, so that they can be reduced while the rest is on its way."""

    def stream(
        self, outgoing: Tensor, dst: int, incoming: Tensor, src: int, *, timeout: float | None = None
    ) -> Iterator[tuple[int, int]]:
        """Exchange two flat tensors; yield the bounds of each part of `incoming` when it has come, in order."""
        ...
