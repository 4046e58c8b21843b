"""Launches on a GPU without one: streams and events that a test completes by hand."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fake_gpu import DEVICE, GPU, FakeEvent, FakeStream, Owner, launch
from murmura import DDP, ErrorFeedback, InProcessTransport, MinMaxUInt8, ProcessGroupTransport
from murmura.algorithms.background_exchange import BackgroundExchanges, PendingExchange
from murmura.ddp import replica_checks
from murmura.ddp.tail import Tail
from murmura.errors import ConfigError, PeerLost, PeerTimeout, UsageError
from murmura.transports import group_operations, own_groups
from murmura.transports.cuda_launches import LEFT_SECONDS, CudaLaunches
from murmura.transports.error_reporter import Reporter
from murmura.transports.group_operations import MEAN
from murmura.transports.launching import UNDEFINED
from murmura.transports.rendezvous import file_store
from murmura.transports.serial_executor import EndedTicket
from murmura.types import ReduceOp


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GPU:
    return GPU(monkeypatch)


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


def test_parts_side_by_side_are_one_tensor_if_they_share_its_memory() -> None:
    whole = torch.arange(6.0)
    assert torch.equal(group_operations.side_by_side(whole.split(2)), whole)
    assert group_operations.side_by_side([whole[2:4], whole[:2]]) is None
    memory = bytearray(16)
    apart = [torch.frombuffer(memory, dtype=torch.float32, count=2, offset=each) for each in (0, 8)]
    assert group_operations.side_by_side(apart) is None  # a view of the one does not reach the other


def test_a_mean_on_a_gpu_is_nccl_s_own_where_it_has_the_bits_of_a_sum_that_is_divided() -> None:
    own = [size for size in range(1, 10) if group_operations.native_op(ReduceOp.MEAN, size, on_cuda=True) == MEAN]
    assert own == [1, 2, 4, 8]
    assert group_operations.native_op(ReduceOp.MEAN, 2, on_cuda=False) == dist.ReduceOp.SUM


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
    gpu.training.done()  # the kernel has ended after all
    third = CudaLaunches(later := Owner(), DEVICE)
    launch(third, "all_reduce #3", limit=60.0)
    timer = threading.Timer(0.1, gpu.training.done)
    timer.start()
    third.drain()
    assert later.failure is None
    timer.join()
    for each in (first, second, third):
        each.close()


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


def test_memory_of_a_tensor_is_not_used_again_before_the_other_stream_is_done_with_it(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[Any, Any]] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
    launches, given, made = CudaLaunches(Owner(), DEVICE), torch.ones(2), torch.ones(3)
    ticket = launches.run_beside("all_gather", lambda: [made], [given])
    side = launches.order.stream
    assert [(tensor is given, stream is side) for tensor, stream in recorded] == [(True, True)]
    ticket.wait()
    assert [(tensor is made, stream is gpu.training) for tensor, stream in recorded[1:]] == [(True, True)]
    with InProcessTransport.create_group(1)[0] as transport:
        monkeypatch.setattr(transport, "communication_stream", lambda device: side)
        BackgroundExchanges(transport).start("bucket 0", [given], lambda: None)._ticket.wait()
    assert [(tensor is given, stream is side) for tensor, stream in recorded[2:]] == [(True, True)]
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


@pytest.mark.parametrize("where", ["channel", "split"])
def test_a_state_that_an_exchange_under_way_may_spoil_is_waited_for(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, where: str, tmp_path: Path
) -> None:
    """The copies to the host would end with the exchange that is broken off, and a file hold what it left."""
    with own_transport(tmp_path) as transport:
        ddp = DDP(torch.nn.Linear(2, 2), transport)
        channel: Any = ddp._replica.transport
        split = channel.split("average")
        for each in (channel, split):
            each.launches = CudaLaunches(each, DEVICE)
        failing = channel if where == "channel" else split
        launch(failing.launches)
        reader = threading.current_thread()

        def query(event: FakeEvent) -> bool:
            if threading.current_thread() is reader:  # what is broken off looks as if it had ended
                failing.give_up(PeerTimeout("rank 1 has not come", rank=0, peer=1))
                return True
            return False

        monkeypatch.setattr(FakeEvent, "query", query)
        with pytest.raises(PeerTimeout, match="rank 1 has not come"):
            ddp.state_dict()
        ddp.close()


def test_a_failure_that_no_call_has_raised_is_raised_by_close(gpu: GPU, tmp_path: Path) -> None:
    """A program whose last round fails would end well on weights that are undefined."""
    with own_transport(tmp_path) as transport:
        ddp = DDP(torch.nn.Linear(2, 2), transport)
        channel: Any = ddp._replica.transport
        channel.launches = CudaLaunches(channel, DEVICE)
        channel.give_up(PeerTimeout("rank 1 has not come", rank=0, peer=1))
        with pytest.raises(PeerTimeout, match="rank 1 has not come"):
            ddp.close()
        assert channel.closed
        ddp.close()  # it has been told


def test_tensors_on_another_gpu_than_that_of_the_rank_are_refused(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No watchdog would see an operation on them, and it would be in no order with the others."""
    elsewhere = torch.device("cuda", 1)
    model, tensor = torch.nn.Linear(2, 2), torch.ones(2)
    with own_transport(tmp_path) as transport:
        transport.device = DEVICE
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(torch.Tensor, "device", elsewhere)
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: elsewhere.index)
        with pytest.raises(UsageError, match=r"is on cuda:1, and this transport works on cuda:0"):
            transport.all_reduce(tensor)
        assert not transport.failed
        with pytest.raises(ConfigError, match=r"'weight' is on cuda:1.*model\.to\('cuda:0'\)"):
            replica_checks.check_on_one_gpu(transport, dict(model.named_parameters()))
        transport.device = torch.device("cuda")  # as a group of a foreign kind may say: which one is not known
        replica_checks.check_on_one_gpu(transport, dict(model.named_parameters()))


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


def test_a_failure_on_the_gpu_keeps_its_cause(gpu: GPU, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with own_transport(tmp_path) as transport:
        told = Reporter(0, range(2)).lost(1, "all_reduce #1")
        transport.give_up(told)
        failure = transport.failure
        assert type(failure) is PeerLost
        assert (failure.rank, failure.peer, failure.operation) == (0, 1, "all_reduce #1")
        assert failure.cause is told.cause is not None
        assert str(failure) == f"{told} {UNDEFINED}" == caplog.messages[0]


def test_a_peer_that_left_may_be_a_little_ahead_and_one_that_died_is_not_waited_for(
    gpu: GPU, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with own_transport(tmp_path) as transport:
        pending: Any = SimpleNamespace(warn_after=60.0)
        left, died = PeerLost("rank 1 left", peer=1), PeerLost("rank 1 died", peer=1)
        left.left = True
        for cause, at_once in ((left, None), (died, died)):
            monkeypatch.setattr(transport, "known_cause", lambda launch, waited, cause=cause: cause)
            assert transport.find_fault(pending, LEFT_SECONDS - 0.1, timed_out=False) is at_once
            assert transport.find_fault(pending, LEFT_SECONDS, timed_out=False) is cause


def test_an_exchange_that_was_broken_off_on_the_gpu_raises_where_its_result_is_wanted(gpu: GPU) -> None:
    with InProcessTransport.create_group(1)[0] as transport:
        side = FakeStream()
        pending = PendingExchange(transport, EndedTicket("bucket 0"), [side])  # type: ignore[list-item]
        pending.wait()
        assert gpu.training.waited_for == [side]
        transport.abort(PeerTimeout("rank 1 has not come"))
        with pytest.raises(PeerTimeout, match="rank 1 has not come"):
            pending.wait()
