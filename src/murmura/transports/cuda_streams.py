"""Streams and events of CUDA, as the hot path of launches and messages between threads need them."""

from __future__ import annotations

import torch
from torch import Tensor

_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: int) -> torch.cuda.Stream:
    """torch's current stream of GPU number `device`; to make the object anew takes longer than a launch."""
    key = device, torch._C._cuda_getCurrentRawStream(device)
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream(device)
    return _streams[key]


def is_done(event: torch.cuda.Event) -> bool:
    """Whether the device has come to where `event` was recorded last."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def event_on_stream_of(tensor: Tensor) -> torch.cuda.Event | None:
    """An event after all that is queued on this thread's stream of the GPU that `tensor` is on; None on a CPU."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def stream_waits(tensor: Tensor, event: torch.cuda.Event | None) -> None:
    """Let this thread's stream of the GPU that `tensor` is on wait for `event`."""
    if event is not None:
        torch.cuda.current_stream(tensor.device).wait_event(event)


class OnStream:
    """Inside it `stream` is the current one; as `torch.cuda.stream`, at half its cost where the device is current."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._device = torch.cuda.current_device()

    def __enter__(self) -> None:
        self._before = current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *failure: object) -> None:
        torch.cuda.set_stream(self._before)
        if self._device != self._stream.device_index:
            torch.cuda.set_device(self._device)
