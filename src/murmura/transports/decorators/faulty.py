"""FaultyTransport: a fault at a chosen rank and operation, to see what a program makes of it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Self

import torch

from murmura.errors import ConfigError, TransportClosed
from murmura.transports.base import Transport
from murmura.transports.checks import Tensors
from murmura.transports.decorators.base import TransportDecorator
from murmura.types import parse

__all__ = ["Fault", "FaultyTransport"]

SLOW_SECONDS = 1.0


class Fault(StrEnum):
    """What happens to the chosen rank."""

    KILL = "kill"  # its process is killed; not for ranks that are threads
    HANG = "hang"  # it never comes, until it is closed or aborted
    SLOW = "slow"  # it comes a second late
    RAISE = "raise"  # a RuntimeError is raised in its program
    CORRUPT = "corrupt"  # one bit of what it receives is flipped, silently


class FaultyTransport(TransportDecorator):
    """Wrap every rank alike; the fault strikes once, on `rank`, before (or, to corrupt, after) `operation`.

    `operation` is a name, "all_reduce", or the k-th of that name on any one channel, "all_reduce #3". `fired` says
    whether it has struck here, or on a channel split off: a test of a fault should assert that.
    """

    def __init__(self, transport: Transport, fault: str, *, rank: int, operation: str) -> None:
        super().__init__(transport)
        self.fault = parse(Fault, fault, "fault")
        parts = re.fullmatch(r"(\w+)(?: #([1-9]\d*))?", operation) if isinstance(operation, str) else None
        if parts is None or not hasattr(Transport, parts[1]):
            raise ConfigError(
                f"operation={operation!r}: name an operation ('all_reduce'), or the k-th ('all_reduce #3')."
            )
        if not isinstance(rank, int) or not 0 <= rank < transport.world_size:
            raise ConfigError(f"rank={rank!r} is not a rank of this world of {transport.world_size}.")
        self._is_target = transport.rank == rank
        self._operation_asked = operation
        self._struck = threading.Event()  # one for all channels split off
        self._name, self._countdown = parts[1], int(parts[2] or 1)

    @property
    def fired(self) -> bool:
        return self._struck.is_set()

    def around(self, name: str, sent: Tensors, received: Tensors, work: Callable[[], Any]) -> Any:
        if self._is_target and name == self._name and not self.fired:
            self._countdown -= 1
            if self._countdown == 0:
                self._struck.set()
                return self._strike(received, work)
        return work()

    def _strike(self, received: Tensors, work: Callable[[], Any]) -> Any:
        if self.fault is Fault.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault is Fault.HANG:
            self._ended.wait()
            raise TransportClosed(
                f"rank {self.reporter.own} hung in {self.operation}, as asked, until it was closed.",
                rank=self.reporter.own,
                operation=self.operation,
            )
        elif self.fault is Fault.RAISE:
            raise RuntimeError(f"rank {self.reporter.own} raised in {self.operation}, as asked.")
        elif self.fault is Fault.SLOW:
            time.sleep(SLOW_SECONDS)
        result = work()
        if self.fault is Fault.CORRUPT:
            _flip_a_bit(received, result)
        return result

    def wrap(self, split: Transport) -> Self:
        # The target is a rank of this transport; the subgroup numbers its ranks anew, and may be without it.
        wrapped = type(self)(split, self.fault, rank=split.rank, operation=self._operation_asked)
        wrapped._is_target = self._is_target
        wrapped._struck = self._struck
        return wrapped


def _flip_a_bit(received: Tensors, result: Any) -> None:
    """Flip the sign, or the highest bit, of the first element received."""
    results = result if isinstance(result, list) else [result]
    for tensor in [*received, *(each for each in results if isinstance(each, torch.Tensor))]:
        if tensor.numel():
            first = tensor.detach().reshape(-1)[:1]
            flipped = first.clone()
            flipped.view(torch.uint8)[-1] ^= 1 if tensor.dtype is torch.bool else 0x80
            tensor.detach()[(0,) * tensor.dim()] = flipped[0]
            return
