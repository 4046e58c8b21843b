"""Exchanges that run beside training: in a thread or, on a GPU, on the communication stream of their channel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from murmura.transports.base import Transport
from murmura.transports.serial_executor import Ticket


class PendingExchange:
    """An exchange under way; its tensors must not be used until `wait` returns."""

    def __init__(self, channel: Transport, ticket: Ticket, ended: dict[torch.cuda.Stream, torch.cuda.Event]) -> None:
        self._channel = channel
        self._ticket = ticket
        self._ended = ended  # filled when the exchange has been enqueued

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._ticket.done()

    def wait(self) -> None:
        """Wait until the exchange has ended and its tensors may be used again; raise its error.

        On a GPU the current stream waits until it has ended, and the host only until it has been enqueued.
        """
        self._ticket.wait()
        for stream, event in self._ended.items():
            torch.cuda.current_stream(stream.device).wait_event(event)
        if self._ended and self._channel.failed:  # after it had been enqueued
            self._channel.check_usable()


class BackgroundExchanges:
    """Runs one exchange after another on `channel`, in the order they were started."""

    def __init__(self, channel: Transport) -> None:
        self._channel = channel

    def start(self, what: str, tensors: Sequence[Tensor], work: Callable[[], None]) -> PendingExchange:
        """Run `work` on `tensors`, which must not be used until `wait` returns."""
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        streams = [self._channel.communication_stream(device) for device in devices]
        ended: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        if not streams:
            return PendingExchange(self._channel, self._channel.submit_job(what, torch.no_grad()(work)), ended)
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        for tensor in tensors:
            if tensor.is_cuda:  # if it is dropped after an error, its memory is not reused before the stream is done
                tensor.record_stream(self._channel.communication_stream(tensor.device))

        def run() -> None:
            with torch.no_grad(), contextlib.ExitStack() as current:
                for stream in streams:
                    current.enter_context(torch.cuda.stream(stream))
                work()
                ended.update({stream: stream.record_event() for stream in streams})

        return PendingExchange(self._channel, self._channel.submit_job(what, run), ended)
