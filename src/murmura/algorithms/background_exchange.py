"""Exchanges that run beside training: in a thread and, on a GPU, on a stream of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from murmura.transports.base import Transport
from murmura.transports.serial_executor import Ticket


class PendingExchange:
    """An exchange under way; its tensors must not be used until `wait` returns."""

    def __init__(self, ticket: Ticket, streams: Sequence[torch.cuda.Stream]) -> None:
        self._ticket = ticket
        self._streams = streams

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._ticket.done()

    def wait(self) -> None:
        """Wait until the exchange has ended and its tensors may be used again; raise its error."""
        self._ticket.wait()
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)


class BackgroundExchanges:
    """Runs one exchange after another in the communication thread of `channel`, in the order they were started."""

    def __init__(self, channel: Transport) -> None:
        self._channel = channel
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, what: str, tensors: Sequence[Tensor], work: Callable[[], None]) -> PendingExchange:
        """Run `work` on `tensors`, which must not be used until `wait` returns."""
        streams = [self._stream(device) for device in {tensor.device for tensor in tensors if tensor.is_cuda}]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

        def run() -> None:
            with torch.no_grad(), contextlib.ExitStack() as current:
                for stream in streams:
                    current.enter_context(torch.cuda.stream(stream))
                work()

        return PendingExchange(self._channel.submit_job(what, run), streams)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]
