"""Exchanges that run beside training: in a thread or, on a GPU, on the communication stream of their channel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from murmura.algorithms.checks import instances_of
from murmura.errors import UsageError
from murmura.transports.base import Transport
from murmura.transports.cuda_streams import OnStream, current_stream
from murmura.transports.serial_executor import Ticket


class PendingExchange:
    """An exchange under way; its tensors must not be used until `wait` returns."""

    def __init__(self, channel: Transport, ticket: Ticket, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        self._channel = channel
        self._ticket = ticket
        self._streams = streams

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._ticket.done()

    def wait(self) -> None:
        """Wait until the exchange has ended and its tensors may be used again; raise its error.

        On a GPU the current stream waits until it has ended, and the host only until it has been enqueued.
        """
        wait_for([self])


def wait_for(exchanges: Sequence[PendingExchange]) -> None:
    """Wait until all of them have ended; see `PendingExchange.wait`."""
    streams: dict[torch.cuda.Stream, Transport] = {}
    for each in exchanges:
        each._ticket.wait()
        streams.update(dict.fromkeys(each._streams, each._channel))
    for stream, channel in streams.items():
        current_stream(stream.device_index).wait_stream(stream)
        if channel.failed:  # after the exchange had been enqueued
            channel.check_usable()


class BackgroundExchanges:
    """Runs one exchange after another on `channel`, in the order they were started."""

    def __init__(self, channel: Transport) -> None:
        instances_of(Transport, channel=channel)
        self._channel = channel
        self._filled: dict[torch.device, torch.cuda.Event] = {}  # recorded anew for each exchange

    def start(
        self, what: str, tensors: Sequence[Tensor], work: Callable[[], None], operation: str = "exchange"
    ) -> PendingExchange:
        """Run `work` on `tensors`, which must not be used until `wait` returns; a profiler calls it `operation`."""
        if not callable(work):
            raise UsageError(f"work={work!r} is no function.")
        if not isinstance(tensors, Sequence):
            raise UsageError(f"tensors={tensors!r}: give a list of those that the exchange uses.")
        streams: dict[torch.device, torch.cuda.Stream] = {}
        for tensor in tensors:
            instances_of(Tensor, tensors=tensor)
            if tensor.is_cuda:
                device = tensor.device
                if device not in streams:
                    streams[device] = self._follow(device)
                tensor.record_stream(streams[device])  # if it is dropped after an error, the stream may still use it
        sides = list(streams.values())

        def run() -> None:
            if len(sides) == 1:
                with _without_gradients(), OnStream(sides[0]):
                    work()
                return
            with _without_gradients(), contextlib.ExitStack() as current:
                for side in sides:
                    current.enter_context(OnStream(side))
                work()

        return PendingExchange(self._channel, self._channel.submit_job(what, run, operation), sides)

    def _follow(self, device: torch.device) -> torch.cuda.Stream:
        """The communication stream, which waits for what the current one has to do by now."""
        stream = self._channel.communication_stream(device)
        filled = self._filled.get(device)
        if filled is None:
            filled = self._filled[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        filled.record(current_stream(device.index))
        stream.wait_event(filled)
        return stream


def _without_gradients() -> AbstractContextManager[Any]:
    """torch.no_grad() where it is not in force already, as it is inside a backward."""
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()
