"""The watchdog: deadlines of operations on a GPU, for which no host waits; on a GPU that is none."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from fake_gpu import DEVICE, GPU, FakeEvent, Owner, launch
from murmura.errors import PeerTimeout
from murmura.transports import watchdog
from murmura.transports.cuda_launches import CudaLaunches, Launch
from murmura.transports.error_reporter import Reporter
from murmura.transports.failure_log import FailureLog
from murmura.transports.liveness import Liveness


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    return GPU(monkeypatch)


def test_an_operation_that_does_not_end_is_given_up_at_its_deadline(gpu: GPU) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    launches.run("bucket 3 of round 7", lambda: launch(launches, limit=0.1))
    gpu.training.events[0].is_done = True  # it has begun
    assert owner.gave_up.wait(10.0)
    assert "all_reduce #1 of bucket 3 of round 7" in str(owner.failure)
    with pytest.raises(PeerTimeout):
        launches.raise_failure("all_reduce #2")
    launches.close()


def test_an_operation_is_watched_while_the_host_still_launches_it(gpu: GPU) -> None:
    """NCCL connects two ranks at their first message, and the host waits for that inside torch."""
    owner, unwatched = Owner(), []
    launches = CudaLaunches(owner, DEVICE)

    def connect(_: None) -> None:
        gpu.training.events[0].is_done = True  # the device has come to it
        unwatched.append(not owner.gave_up.wait(10.0))
        raise RuntimeError("the communicator was aborted")

    with pytest.raises(RuntimeError, match="was aborted"):
        launches.launch(connect, "exchange", "exchange: send(dst=1) of float32[3]", [1], 0.1)
    assert unwatched == [False]
    launches.close()


def test_channels_may_be_split_off_while_the_watchdog_looks() -> None:
    """An error there would end its thread, and with it all deadlines until the next launch."""
    dog, over, errors = watchdog.Watchdog(DEVICE), threading.Event(), []

    class Idle:
        def look(self) -> bool:
            return False

    def look() -> None:
        try:
            while not over.is_set():
                dog.look()
        except RuntimeError as error:
            errors.append(error)

    channels = [Idle() for _ in range(2000)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for channel in channels:
            dog.watch(channel)
    finally:
        sys.setswitchinterval(interval)
        over.set()
        thread.join()
    assert errors == []


def test_the_time_of_an_operation_does_not_run_before_it_begins(gpu: GPU) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    launch(launches, limit=0.05)
    assert not owner.gave_up.wait(0.3)
    assert owner.asked == []
    gpu.training.events[0].is_done = True
    assert owner.gave_up.wait(10.0)
    launches.close()


def test_the_watchdog_outlives_a_look_that_fails(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "IDLE_LOOKS", 1)  # it must not sleep while it cannot look
    owner, num_failed, query = Owner(), [0], FakeEvent.query

    def refuse(event: FakeEvent) -> bool:
        if num_failed[0] < 3:
            num_failed[0] += 1
            raise RuntimeError("operation not permitted when stream is capturing")
        return query(event)

    monkeypatch.setattr(FakeEvent, "query", refuse)
    launches = CudaLaunches(owner, DEVICE)
    launch(launches, limit=0.05)
    gpu.training.events[0].is_done = True
    assert owner.gave_up.wait(10.0)
    assert num_failed == [3]
    assert [record.message for record in caplog.records if "is capturing" in record.message] == caplog.messages[:1]
    launches.close()


def test_the_watchdog_does_not_sleep_between_two_rounds() -> None:
    """To wake its thread takes the GIL from the one that launches, in every step."""

    class Channel:
        is_pending = False

        def look(self) -> bool:
            return self.is_pending

    dog, channel, awake_after = watchdog.Watchdog(DEVICE), Channel(), []
    dog.watch(channel)
    dog._awake.set()
    for channel.is_pending in (True, *[False] * watchdog.IDLE_LOOKS, True, *[False] * (watchdog.IDLE_LOOKS + 1)):
        dog.look()
        awake_after.append(dog._awake.is_set())
    assert awake_after == [True] * (len(awake_after) - 1) + [False]


def test_a_launch_that_is_done_at_the_next_look_keeps_the_watchdog_awake() -> None:
    dog = watchdog.Watchdog(DEVICE)
    dog._thread = threading.current_thread()  # so that none is started
    for _ in range(2):
        dog.wake()
        for _ in range(watchdog.IDLE_LOOKS):
            dog.look()
            assert dog._awake.is_set()


def test_a_launch_wakes_the_watchdog(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "IDLE_LOOKS", 3)
    owner, slept = Owner(), threading.Event()
    launches = CudaLaunches(owner, DEVICE)
    awake = launches._watchdog._awake
    monkeypatch.setattr(awake, "clear", lambda clear=awake.clear: (clear(), slept.set()))
    launch(launches)
    gpu.training.done()
    assert slept.wait(10.0)
    launch(launches, limit=0.05)
    gpu.training.events[-2].is_done = True  # it has begun, and does not end
    assert owner.gave_up.wait(10.0)
    launches.close()


def test_the_watchdog_looks_on_the_gpu_of_its_transport(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query in a thread that has set no GPU makes a context on GPU 0, hundreds of megabytes in every rank's name."""
    owner, query, looked_on = Owner(), FakeEvent.query, set()

    def look(event: FakeEvent) -> bool:
        looked_on.add(gpu.devices.get(threading.get_ident()))
        return query(event)

    launches = CudaLaunches(owner, torch.device("cuda", 3))
    monkeypatch.setattr(FakeEvent, "query", look)
    launch(launches, limit=0.05)
    gpu.training.events[0].is_done = True
    assert owner.gave_up.wait(10.0)
    assert looked_on == {torch.device("cuda", 3)}
    launches.close()


def test_the_watchdog_breaks_no_graph_that_is_captured_elsewhere(gpu: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its thread is told otherwise, its first query of an event ends the captures of all threads."""
    owner, query, modes, looked_in = Owner(), FakeEvent.query, {}, set()

    class Driver:
        def __init__(self, name: str) -> None:
            assert name == "libcuda.so.1"

        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
            modes[threading.get_ident()] = mode._obj.value
            return 0

    def look(event: FakeEvent) -> bool:
        looked_in.add(modes.get(threading.get_ident()))
        return query(event)

    monkeypatch.setattr(watchdog.ctypes, "CDLL", Driver)
    launches = CudaLaunches(owner, DEVICE)
    monkeypatch.setattr(FakeEvent, "query", look)
    launch(launches, limit=0.05)
    gpu.training.events[0].is_done = True
    assert owner.gave_up.wait(10.0)
    assert looked_in == {1}  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    launches.close()


def test_an_operation_has_a_deadline_behind_one_that_has_not_begun(gpu: GPU) -> None:
    """The host waits for one apart, while another is queued behind kernels of training."""
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    launch(launches, "all_reduce #1", limit=0.1)  # never begins
    with pytest.raises(PeerTimeout, match="barrier #2"), launches.apart():
        begin = threading.Timer(0.05, lambda own: setattr(own.events[0], "is_done", True), [gpu.current])
        begin.start()
        launch(launches, "barrier #2", limit=0.1)
    begin.join()
    launches.close()


def test_a_watchdog_whose_thread_is_gone_gets_another(gpu: GPU) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    launches._watchdog._thread = ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    launch(launches, limit=0.05)
    gpu.training.events[0].is_done = True
    assert owner.gave_up.wait(10.0)
    launches.close()


def test_a_fault_that_is_known_ends_an_operation_before_its_deadline(gpu: GPU) -> None:
    owner = Owner()
    owner.fault = ConnectionError("rank 1 is gone")
    launches = CudaLaunches(owner, DEVICE)
    launch(launches)
    gpu.training.events[0].is_done = True
    assert owner.gave_up.wait(10.0)
    assert owner.failure is owner.fault
    launches.close()


def test_an_operation_that_ends_while_its_fault_is_looked_for_is_not_given_up(gpu: GPU) -> None:
    told = threading.Event()

    class Late(Owner):
        def find_fault(self, launch: Launch, waited: float, *, timed_out: bool) -> BaseException | None:
            gpu.training.done()
            told.set()
            return ConnectionError("rank 1 is gone")

    owner = Late()
    launches = CudaLaunches(owner, DEVICE)
    launch(launches)
    gpu.training.events[0].is_done = True
    assert told.wait(10.0)
    launches.close()  # which waits for the look under way
    assert owner.failure is None


def test_a_store_that_does_not_answer_keeps_no_other_operation_from_its_deadline(gpu: GPU) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    class Stopped:
        """A store whose server is stopped."""

        def check(self, keys: list[str]) -> bool:
            asked.set()
            return may_answer.wait(60.0) and False

    failure_log = FailureLog(Stopped(), 0, 2, Liveness({}), Reporter(0, range(2)))

    class Asking(Owner):
        def find_fault(self, launch: Launch, waited: float, *, timed_out: bool) -> BaseException | None:
            return failure_log.cause(launch.operation, waited) or super().find_fault(
                launch, waited, timed_out=timed_out
            )

    asking, other = Asking(), Owner()
    first, second = CudaLaunches(asking, DEVICE), CudaLaunches(other, DEVICE)
    second.follow(first)  # a channel that was split off, which the same thread looks after
    launch(first, limit=60.0)
    gpu.training.events[0].is_done = True
    assert asked.wait(10.0)
    launch(second, limit=0.1)
    gpu.training.events[-2].is_done = True  # it has begun
    gave_up = other.gave_up.wait(10.0)
    may_answer.set()
    first.close()
    second.close()
    assert gave_up
    assert asking.failure is None


def test_what_the_gpu_does_not_begin_is_told_after_a_while(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    monkeypatch.setattr(launches._watchdog, "wake", lambda: None)  # it looks only where this test does
    launch(launches, "all_reduce #7")
    launches._pending[0].warn_queued_after = 0.0
    assert launches.look()
    assert ["all_reduce #7 was launched" in each and "has not begun it" in each for each in caplog.messages] == [True]
    gpu.training.done()
    launches.close()
