"""Launches on a GPU without one: streams and events that a test completes by hand."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fake_gpu import DEVICE, GPU, FakeEvent, FakeStream, Owner
from murmura import ErrorFeedback, InProcessTransport, MinMaxUInt8, ProcessGroupTransport
from murmura.ddp.tail import Tail
from murmura.errors import PeerTimeout, UsageError
from murmura.transports import cuda_launches, group_operations, own_groups, watchdog
from murmura.transports.cuda_launches import CudaLaunches, Launch
from murmura.transports.error_reporter import Reporter
from murmura.transports.failure_log import FailureLog
from murmura.transports.liveness import Liveness
from murmura.transports.rendezvous import file_store


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0.01)
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


def test_an_operation_whose_launch_is_refused_leaves_nothing_to_watch(gpu: GPU) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)

    def refuse(_: None) -> None:
        raise RuntimeError("Tensors must be CUDA and dense")

    with pytest.raises(RuntimeError, match="must be CUDA"):
        launches.launch(refuse, "all_reduce #1", "all_reduce(sum) of float32[3]", [1], 0.1)
    gpu.training.done()
    assert not launches.look()
    assert not owner.gave_up.wait(0.2)
    launches.close()


def test_no_operation_becomes_part_of_a_graph(gpu: GPU) -> None:
    """Its events would be the graph's: every query of them fails, and the deadlines of all that follows are lost."""
    launches = CudaLaunches(Owner(), DEVICE)
    gpu.is_capturing = True
    with pytest.raises(UsageError, match="all_reduce #1 was called while a CUDA graph is captured"):
        launch(launches)
    assert not launches.look()
    assert gpu.training.events == gpu.training.waited_for == []
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


def test_a_torch_that_cannot_run_an_operation_on_the_current_stream_is_not_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.6 has asyncOp for a broadcast, and not for an all-reduce or an all-to-all."""

    class Options:
        __slots__ = ("reduceOp", "timeout")

    monkeypatch.setattr(dist, "AllreduceOptions", Options)
    made = group_operations.launched_all_reduce_options.__wrapped__(dist.ReduceOp.SUM)
    assert made.reduceOp == dist.ReduceOp.SUM
    assert not group_operations.on_current_stream(dist.BroadcastOptions()).asyncOp


def test_the_bytes_of_a_single_element_of_a_column() -> None:
    """It is contiguous whatever its stride, but has no view of its bytes."""
    column = torch.arange(6.0).view(3, 2)[:, 1]
    for part in column.split(1):
        assert torch.equal(group_operations.raw(part).view(torch.float32), part)


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


def test_what_is_done_is_forgotten(gpu: GPU) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    for number in range(5):
        launch(launches, f"all_reduce #{number}", limit=0.05)
        gpu.training.done()
    launches.drain()
    assert not owner.gave_up.wait(0.2)
    launches.close()


def test_closing_does_not_wait_for_ever_for_what_never_begins(gpu: GPU) -> None:
    """Behind a kernel that does not end, no deadline of the watchdog's runs: the time of an operation has not begun."""
    owners = Owner(), Owner()
    first, second = (CudaLaunches(owner, DEVICE) for owner in owners)
    second.follow(first)
    launch(first, "all_reduce #1", limit=0.1)
    launch(second, "all_reduce #2", limit=60.0)
    first.drain()
    assert "all_reduce #1" in str(owners[0].failure)
    second.drain()  # on the same device, so that it need not be waited for
    assert "all_reduce #2" in str(owners[1].failure)
    first.close()
    second.close()


def test_closing_waits_for_what_has_begun_and_for_what_is_behind_it(gpu: GPU) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    launch(launches, "all_reduce #1", limit=60.0)
    launch(launches, "all_reduce #2", limit=0.2)  # whose time runs when it is the next
    began, ended, *second = gpu.training.events
    began.is_done = True
    timers = [threading.Timer(0.3, setattr, [ended, "is_done", True]), threading.Timer(0.4, gpu.training.done)]
    for timer in timers:
        timer.start()
    launches.drain()
    assert all(event.is_done for event in second)
    assert owner.failure is None
    for timer in timers:
        timer.join()
    launches.close()


def test_waiting_for_the_end_of_a_ticket_raises_nothing(gpu: GPU) -> None:
    owner = Owner()
    launches = CudaLaunches(owner, DEVICE)
    ticket = launches.run_beside("all_reduce", lambda: launch(launches), [])
    assert not ticket.await_end(0.01)
    owner.failure = PeerTimeout("rank 1 has not come")
    assert ticket.await_end(5.0)
    with pytest.raises(PeerTimeout):
        ticket.wait(5.0)
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


def test_a_group_that_does_not_end_holds_nobody_up(gpu: GPU) -> None:
    gate, on = threading.Event(), []
    assert not own_groups.end_within(0.05, DEVICE, lambda: on.append(gate.wait(10.0)))
    gate.set()
    assert own_groups.end_within(10.0, DEVICE, lambda: on.append(gpu.devices[threading.get_ident()]))
    assert DEVICE in on
    with pytest.raises(ZeroDivisionError):
        own_groups.end_within(10.0, DEVICE, lambda: on.append(1 // 0))


def test_a_group_ends_with_an_interpreter_that_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ended: list[bool] = []
    assert own_groups.end_within(10.0, DEVICE, lambda: ended.append(True))
    assert ended == [True]


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


def test_the_host_does_not_wait_for_a_tail_whose_exchange_has_failed() -> None:
    """A group that was handed over is not aborted, so its kernel, and the copy behind it, may never end."""

    class Never(FakeEvent):
        def synchronize(self) -> None:
            raise AssertionError("the host waits for ever")

    with InProcessTransport.create_group(1)[0] as transport:
        bucket: Any = SimpleNamespace(names=["weight"], parameters=[None], flat=torch.zeros(1))
        tail = Tail([bucket], transport)
        tail._copied = Never()  # type: ignore[assignment]
        timer = threading.Timer(0.05, transport.abort, [PeerTimeout("rank 1 has not come")])
        timer.start()
        with pytest.raises(PeerTimeout, match="rank 1 has not come"):
            tail.read(0)
        timer.join()


def test_a_group_that_cannot_be_aborted_keeps_nothing_else_from_it(gpu: GPU) -> None:
    """After an error of the GPU itself, to abort a communicator raises that error again."""
    num_tried = [0]

    def abort() -> None:
        num_tried[0] += 1
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    group = SimpleNamespace(abort=abort)
    transport: Any = SimpleNamespace(_owns_group=True, _on_cuda=True, device=DEVICE, _group=group)
    ProcessGroupTransport.end_group_waits(transport)
    assert num_tried == [1]


def own_transport(folder: Path) -> ProcessGroupTransport:
    """A rank alone whose operations are launched on a GPU that is none."""
    transport = ProcessGroupTransport.join(file_store(str(folder / "store"), 1), 0, 1, timeout=20.0)
    transport.launches = CudaLaunches(transport, DEVICE)
    return transport


def test_peers_hear_that_a_rank_left_when_its_gpu_has_begun_what_they_wait_for(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transport, asked, query = own_transport(tmp_path), threading.Event(), FakeEvent.query
    assert transport.launches is not None
    launch(transport.launches)
    failure_log = transport._failure_log
    assert failure_log is not None
    closing = threading.Thread(target=transport.close)

    def look(event: FakeEvent) -> bool:
        if threading.current_thread() is closing:
            asked.set()
        return query(event)

    monkeypatch.setattr(FakeEvent, "query", look)
    closing.start()
    assert asked.wait(10.0)
    assert not failure_log._has("exited")
    gpu.training.events[0].is_done = True  # it has begun
    deadline = time.monotonic() + 10.0
    while not failure_log._has("exited") and time.monotonic() < deadline:
        time.sleep(0.001)
    assert failure_log._has("exited")
    assert closing.is_alive()  # it has not ended
    gpu.training.done()
    closing.join(10.0)
    assert not closing.is_alive()


def test_a_transport_whose_gpu_has_failed_is_closed_all_the_same(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: FakeEvent) -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")

    transport = own_transport(tmp_path)
    assert transport.launches is not None
    launch(transport.launches)
    monkeypatch.setattr(FakeEvent, "query", fail)
    transport.close()
    assert "its GPU has failed: CUDA error: device-side assert triggered." in str(transport.failure)
    assert any(str(transport.failure) == record.message for record in caplog.records)  # nothing is left to raise it
    assert transport._group is None


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
