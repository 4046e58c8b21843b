"""Launches on a GPU without one: streams and events that a test completes by hand."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from murmura import ErrorFeedback, InProcessTransport, MinMaxUInt8
from murmura.errors import PeerTimeout
from murmura.transports import cuda_launches, own_groups
from murmura.transports.cuda_launches import CudaLaunches, Launch, OnStream

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
        self.training = self.current = FakeStream()
        patch.setattr(torch.cuda, "Stream", FakeStream)
        patch.setattr(torch.cuda, "Event", FakeEvent)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: id(self.current), raising=False)
        patch.setattr(cuda_launches, "_streams", {})
        patch.setattr(torch.cuda, "current_device", lambda: 0)
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

    def give_up(self, error: BaseException) -> None:
        self.failure = error
        self.gave_up.set()

    def raise_failure(self, operation: str) -> None:
        assert self.failure is not None
        raise self.failure


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    monkeypatch.setattr(cuda_launches, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(cuda_launches, "SUSPECT_SECONDS", 0.02)
    return GPU(monkeypatch)


def launch(launches: CudaLaunches, operation: str = "all_reduce #1", limit: float = 60.0) -> None:
    launches.launch(lambda _: None, operation, "all_reduce(sum) of float32[3]", [1], limit)


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
    watchdog = launches._watchdog
    watchdog._thread = threading.Thread(target=lambda: None)
    watchdog._thread.start()
    watchdog._thread.join()
    launch(launches, limit=0.05)
    gpu.training.events[0].is_done = True
    assert owner.gave_up.wait(10.0)
    launches.close()


def test_what_is_done_is_forgotten(gpu: GPU) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    for number in range(5):
        launch(launches, f"all_reduce #{number}", limit=0.05)
        gpu.training.done()
    launches.drain()
    assert not owner.gave_up.wait(0.2)
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


def test_operations_of_all_channels_have_one_order(gpu: GPU) -> None:
    owner = Owner()
    first = CudaLaunches(owner, DEVICE)
    second = CudaLaunches(owner, DEVICE)
    second.follow(first)
    with OnStream(first.order.stream):
        launch(first)
    launch(second)  # on the stream of training
    assert gpu.training.waited_for == [first.order.stream]
    with OnStream(first.order.stream):
        launch(second)
    assert first.order.stream.waited_for == [gpu.training]
    gpu.training.done()
    first.order.stream.done()
    for each in (first, second):
        each.close()


def test_a_ticket_makes_the_stream_wait_and_not_the_host(gpu: GPU) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    ticket = launches.run_beside("all_reduce", lambda: launch(launches), [])
    side = launches.order.stream
    assert side.waited_for == [gpu.training]
    assert gpu.current is gpu.training
    assert not ticket.done()
    ticket.wait()
    assert gpu.training.waited_for == [side.events[-1]]
    with pytest.raises(PeerTimeout):
        ticket.wait(0.05)
    side.done()
    assert ticket.done()
    ticket.wait(5.0)
    launches.close()


def test_the_host_waits_where_it_reads_and_for_no_kernel_of_training(gpu: GPU) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    launch(launches)
    with launches.apart():
        own = gpu.current
        assert own is not gpu.training
        timer = threading.Timer(0.1, own.done)
        timer.start()
        launch(launches)
        assert own.events[-1].is_done
        timer.join()
    assert gpu.current is gpu.training
    assert own.waited_for == []
    assert gpu.training.waited_for == [launches.order.stream]  # of the first launch
    with launches.apart(with_current=True), launches.apart():
        pass
    assert own.waited_for == [gpu.training]
    assert gpu.training.waited_for[-1] is own
    gpu.training.done()
    launches.close()


def test_threads_beside_training_have_no_common_order(gpu: GPU) -> None:
    owner = Owner()
    first = CudaLaunches(owner, DEVICE)
    second = CudaLaunches(owner, DEVICE)
    second.follow(first)
    launch(first)
    gpu.current = other = FakeStream()
    for act, waited_for in (
        (lambda: launch(second), []),
        (lambda: second.run("bucket 0", lambda: launch(second)), [gpu.training]),
    ):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        assert other.waited_for == waited_for
    gpu.training.done()
    other.done()
    first.close()
    second.close()


def test_a_job_holds_for_what_was_split_off_and_in_its_thread_alone(gpu: GPU) -> None:
    """Backward launches in a thread of torch's, and within a job also on pairs and hosts, split off its channel."""
    owner = Owner()
    parent, split = CudaLaunches(owner, DEVICE), CudaLaunches(owner, DEVICE)
    split.follow(parent)
    launch(parent)
    gpu.current = other = FakeStream()
    names = []

    def reduce() -> None:
        launch(split)
        beside = threading.Thread(target=lambda: names.append(split.named("all_gather #1")))
        beside.start()
        beside.join()

    thread = threading.Thread(target=lambda: parent.run("bucket 3 of round 7", reduce).wait())
    thread.start()
    thread.join()
    assert split._pending[0].operation == "all_reduce #1 of bucket 3 of round 7"
    assert other.waited_for == [gpu.training]
    assert names == ["all_gather #1"]
    gpu.training.done()
    other.done()
    parent.close()
    split.close()


def test_events_are_used_again(gpu: GPU) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    for _ in range(50):
        launch(launches)
        gpu.training.done()
        launches.look()
    assert len({id(event) for event in gpu.training.events}) <= 4
    launches.close()


def test_the_error_of_a_job_is_carried_by_its_ticket(gpu: GPU) -> None:
    launches = CudaLaunches(Owner(), DEVICE)

    def fail() -> None:
        raise ZeroDivisionError

    ticket = launches.run("bucket 0", fail)
    assert ticket.done()
    with pytest.raises(ZeroDivisionError):
        ticket.wait()
    assert launches.order.job == ""
    with pytest.raises(ZeroDivisionError):
        launches.run_beside("all_reduce", fail, []).wait()
    launches.close()


def test_groups_of_our_own_are_made_without_blocking_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with own_groups._variables_set():
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"  # for the user's own
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ


def test_an_operation_beside_the_caller_leaves_cuda_alone_where_nobody_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context on a GPU takes hundreds of megabytes of it."""

    def initialise(*args: Any) -> Any:
        raise AssertionError("torch.cuda.stream initialises CUDA")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "stream", initialise)
    with InProcessTransport.create_group(1)[0] as transport:
        assert transport.all_reduce(torch.ones(3), async_op=True).wait().tolist() == [1.0] * 3


def test_a_residual_that_is_loaded_may_be_dropped_before_the_device_has_copied_it(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied on the communication stream, and was allocated on training's, which would use its memory again."""
    recorded: list[tuple[torch.Tensor, Any]] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
    gpu.current = FakeStream()
    residual = torch.ones(3)
    ErrorFeedback(MinMaxUInt8()).load_state_dict({"residual": residual, "inner": {}})
    ((tensor, stream),) = recorded
    assert tensor is residual
    assert stream is gpu.current
