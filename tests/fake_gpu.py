"""A GPU that is none: streams and events that a test completes by hand."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch

from murmura.errors import PeerTimeout, TransportError
from murmura.transports import cuda_launches, cuda_streams, launch_order, watchdog
from murmura.transports.cuda_launches import CudaLaunches, Launch

DEVICE = torch.device("cuda", 0)


class FakeEvent:
    """Done when its test says so; what was recorded on a stream is told in `log`."""

    def __init__(self) -> None:
        self.is_done = False
        self.recorded_on: Any = None

    def record(self, stream: Any) -> None:
        self.recorded_on, self.is_done = stream, False
        stream.events.append(self)

    def query(self) -> bool:
        return self.is_done


class FakeStream:
    device_index = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.events: list[FakeEvent] = []
        self.waited_for: list[Any] = []

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.waited_for.append(event)

    def wait_stream(self, stream: FakeStream) -> None:
        self.waited_for.append(stream)

    def done(self) -> None:
        """The device has done all that is queued here."""
        for event in self.events:
            event.is_done = True


class GPU:
    """What replaces torch's GPU: the current stream, which begins as that of training."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(watchdog, "LOOK_SECONDS", 0.01)
        patch.setattr(cuda_launches, "SUSPECT_SECONDS", 0.02)
        self.training = self.current = FakeStream()
        patch.setattr(torch.cuda, "Stream", FakeStream)
        patch.setattr(torch.cuda, "Event", FakeEvent)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: id(self.current), raising=False)
        patch.setattr(cuda_streams, "_streams", {})
        patch.setattr(launch_order, "_orders", weakref.WeakValueDictionary())
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        self.is_capturing = False
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        patch.setattr(torch.cuda, "set_stream", self.set)
        self.devices: dict[int, Any] = {}  # by thread
        patch.setattr(torch.cuda, "set_device", lambda device: self.devices.update({threading.get_ident(): device}))

    def set(self, stream: FakeStream) -> None:
        self.current = stream


class Owner:
    """A transport, as far as launches know one."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.asked: list[tuple[str, bool]] = []
        self.gave_up = threading.Event()
        self.fault: BaseException | None = None

    def find_fault(self, launch: Launch, waited: float, *, timed_out: bool) -> BaseException | None:
        self.asked.append((launch.operation, timed_out))
        return PeerTimeout(f"{launch.operation} took {waited:.1f} s") if timed_out else self.fault

    def never_begun(self, launch: Launch, waited: float) -> BaseException:
        return TransportError(f"{launch.operation} has not begun")

    def give_up(self, error: BaseException) -> None:
        self.failure = error
        self.gave_up.set()

    def raise_failure(self, operation: str) -> None:
        assert self.failure is not None
        raise self.failure


def launch(launches: CudaLaunches, operation: str = "all_reduce #1", limit: float = 60.0) -> None:
    """Launch something that is never started."""
    launches.launch(lambda _: None, operation, "all_reduce(sum) of float32[3]", [1], limit)
