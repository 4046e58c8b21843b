"""TracedTransport: a list of what was done, when, for how long, and with how many bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from murmura.transports.base import Transport
from murmura.transports.checks import Tensors
from murmura.transports.decorators.base import TransportDecorator

__all__ = ["TracedOperation", "TracedTransport"]


@dataclass(frozen=True)
class TracedOperation:
    """One operation of one rank."""

    name: str
    channel: str
    sent_bytes: int  # of the tensors given; a collective may move more or fewer
    received_bytes: int  # of the tensors written, where the caller gave them
    began: float  # time.monotonic(), comparable between processes of a host
    seconds: float
    error: str = ""


class TracedTransport(TransportDecorator):
    """Keeps a `TracedOperation` for every operation, in `operations`; channels split off write to the same list.

    >>> transport = TracedTransport(connect())
    >>> ...
    >>> sum(each.seconds for each in transport.operations if each.name == "all_reduce")
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.operations: list[TracedOperation] = []

    def around(self, name: str, sent: Tensors, received: Tensors, work: Callable[[], Any]) -> Any:
        began, error = time.monotonic(), ""
        try:
            return work()
        except BaseException as failure:
            error = f"{type(failure).__name__}: {failure}"
            raise
        finally:
            self.operations.append(
                TracedOperation(
                    name,
                    self.inner.name,
                    sum(tensor.nbytes for tensor in sent),
                    sum(tensor.nbytes for tensor in received),
                    began,
                    time.monotonic() - began,
                    error,
                )
            )

    def wrap(self, split: Transport) -> Self:
        traced = type(self)(split)
        traced.operations = self.operations
        return traced
