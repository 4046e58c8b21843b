"""The thread that averages by the clock: whoever stops it, or looks at the weights, hears what became of it."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from murmura import InProcessTransport, PeerTimeout
from murmura.algorithms import averaging_loop
from murmura.algorithms.averaging_loop import AveragingLoop

SECONDS = 0.3


@contextlib.contextmanager
def loops() -> Iterator[list[AveragingLoop]]:
    """Those of two ranks that do not vote in time if only one of them is started."""
    transports = InProcessTransport.create_group(2, timeout=SECONDS)
    made = [AveragingLoop(each, [torch.ones(1)], [torch.ones(1)], interval=0.01) for each in transports]
    yield made
    for transport, loop in zip(transports, made, strict=True):
        transport.close()
        loop.close()


def await_failure(loop: AveragingLoop) -> None:
    """The last round is over; then the thread fails."""
    assert loop._thread is not None
    loop._thread.join(20)
    assert not loop._thread.is_alive()


def test_an_error_after_the_last_round_is_raised_by_whoever_stops_or_settles() -> None:
    with loops() as (loop, _):
        loop.start()
        await_failure(loop)
        with pytest.raises(PeerTimeout) as caught:
            loop.stop()
        assert caught.value.peer == 1
        with pytest.raises(PeerTimeout):
            loop.correct(lambda flats: None)


def test_an_error_after_the_last_round_is_logged_at_the_latest_when_closing(caplog: pytest.LogCaptureFixture) -> None:
    with loops() as (loop, _):
        loop.start()
        await_failure(loop)
        loop.close()
        loop.close()
        loop.correct(lambda flats: None)
    assert caplog.text.count("averaging had failed after the last round: rank 0 waited 0.3 s for rank 1") == 1


@pytest.mark.timed
def test_a_thread_that_does_not_stop_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def hang(loop: AveragingLoop, last: float) -> float | None:
        may_end.wait(20)
        return None

    monkeypatch.setattr(AveragingLoop, "vote", hang)
    with loops() as (loop, _):
        loop.start()
        began = time.monotonic()
        with pytest.raises(PeerTimeout, match=r"rank 0 waited 0\.3 s for the average under way to end") as caught:
            loop.stop()
        assert time.monotonic() - began < SECONDS * 1.1 + 1
        assert caught.value.rank == 0
        may_end.set()


def test_a_loop_that_failed_and_was_closed_keeps_its_channel_no_longer() -> None:
    with loops() as (loop, other):
        loop.start()
        await_failure(loop)
        channel = weakref.ref(loop._channel)
    del loop, other
    gc.collect()
    assert channel() is None


def test_a_loop_that_failed_and_was_dropped_unclosed_keeps_its_channel_no_longer() -> None:
    transports = InProcessTransport.create_group(2, timeout=SECONDS)
    loop = AveragingLoop(transports[0], [torch.ones(1)], [torch.ones(1)], interval=0.01)
    loop.start()
    await_failure(loop)
    channel = weakref.ref(transports[0])
    del loop, transports
    gc.collect()
    assert channel() is None


@pytest.mark.timed
def test_closing_does_not_wait_for_ever_for_a_thread_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()

    def hang(loop: AveragingLoop, last: float) -> float | None:
        may_end.wait(20)
        return None

    monkeypatch.setattr(AveragingLoop, "vote", hang)
    monkeypatch.setattr(averaging_loop, "GRACE_SECONDS", 0.1)
    with loops() as (loop, _):
        loop.start()
        began = time.monotonic()
        loop.close()
        assert time.monotonic() - began < SECONDS + 1
        may_end.set()
