"""A long exchange in pieces: one is encoded or decoded while another travels."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch

from murmura.compressors import Compressor
from murmura.transports.order import Order, Ticket


def cut(numel: int, num_elements: int, compressor: Compressor, device: torch.device) -> list[tuple[int, int]]:
    """Bounds of pieces of about `num_elements` out of `numel`, such that they decode to the bits of the whole.

    One piece if the compressor allows no other, or on a GPU, which encodes faster than anything travels. The last one
    takes the remainder.
    """
    grain = None if device.type == "cuda" else compressor.grain
    if grain is None:
        return [(0, numel)]
    step = grain * max(1, num_elements // grain)
    starts = [index * step for index in range(max(1, numel // step))]
    return list(zip(starts, [*starts[1:], numel], strict=True))


class Sideline:
    """Runs what is to be done between exchanges, in order: in a thread beside them, or, if there is one, at once."""

    def __init__(self, num_pieces: int) -> None:
        self._order = Order("coding") if num_pieces > 1 else None

    def start(self, work: Callable[[], None]) -> Ticket:
        if self._order is not None:
            return self._order.submit("coding", lambda: _without_gradients(work))
        work()
        ticket = Ticket("coding")
        ticket.finish(None)
        return ticket

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._order is not None:
            self._order.close()


def _without_gradients(work: Callable[[], None]) -> None:
    with torch.no_grad():
        work()
