"""The way of launched operations without a GPU: Gloo carries them out, and torch is told that floats are on a GPU.

Streams and events are fakes that are always done, so what is seen is the path: hooks, jobs, tickets, orders, staged
tensors in host memory (those of whole numbers), channels.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contracts.catalogue import CATALOGUE
from contracts.training import Run, assert_close, by_step, regression, train
from murmura import DDP, ProcessGroupTransport, Transport, run_world
from murmura.transports import group_operations
from murmura.transports.cuda_launches import CudaLaunches
from murmura.types import ReduceOp
from oracles.algorithms.simulation import simulate
from worlds import SECONDS

DEVICE = torch.device("cuda", 0)
STEPS = 3


class FakeStream:
    device_index, device = 0, DEVICE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.num_waits = 0

    def record_event(self) -> FakeEvent:
        return FakeEvent()

    def wait_event(self, event: Any) -> None:
        self.num_waits += 1

    def wait_stream(self, stream: Any) -> None:
        self.num_waits += 1

    def synchronize(self) -> None:
        return


class FakeEvent:
    def record(self, stream: Any) -> None:
        return

    def query(self) -> bool:
        return True


class Launched(CudaLaunches):
    """Counts launches, and those for which the host waits."""

    num_launches = num_apart = 0

    def launch(self, start: Any, *args: Any) -> None:
        Launched.num_launches += 1
        Launched.num_apart += self._is_apart
        super().launch(start, *args)


def pretend(transport: Transport) -> None:
    """Let this process, which ends with its test, believe in a GPU that Gloo works on."""
    streams = {"current": FakeStream()}
    torch.Tensor.is_cuda = property(lambda tensor: tensor.is_floating_point())  # type: ignore[assignment]
    torch.Tensor.get_device = lambda tensor: 0  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
    torch._C._cuda_getCurrentRawStream = lambda device: id(streams["current"])
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = FakeStream, FakeEvent
    cuda.current_stream = lambda device=None: streams["current"]
    cuda.current_device = lambda: 0
    cuda.is_current_stream_capturing = lambda: False
    cuda.set_device = lambda device: None
    cuda.set_stream = lambda stream: streams.update(current=stream)
    cuda.stream = cuda.device = lambda _: contextlib.nullcontext()

    def start(group: Any, device: Any, sends: Any, recvs: Any, **options: Any) -> None:
        works = [group.recv([out.view(torch.uint8)], src, 0) for out, src in recvs]
        for work in [*works, *(group.send([tensor.view(torch.uint8)], dst, 0) for tensor, dst in sends)]:
            work.wait()

    group_operations.start = start  # type: ignore[assignment]
    group_operations.is_raw_on_cuda = lambda tensor: False  # Gloo has no all-to-all
    make = ProcessGroupTransport.__init__

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._on_cuda = True
        self.launches = Launched(self, DEVICE)

    ProcessGroupTransport.__init__ = initialise  # type: ignore[method-assign]
    assert isinstance(transport, ProcessGroupTransport)
    transport._on_cuda = True
    transport.launches = Launched(transport, DEVICE)
    # Gloo's connections end otherwise than NCCL's.
    ProcessGroupTransport.end_group_waits = lambda self: None  # type: ignore[method-assign]


def train_all(transport: Transport) -> tuple[list[Run], int, int]:
    pretend(transport)
    runs = [train(transport, entry.make(), entry.fit(regression("momentum")), STEPS) for entry in CATALOGUE]
    return runs, Launched.num_launches, Launched.num_apart


@pytest.mark.slow
def test_every_algorithm_is_as_simulated_if_its_operations_are_launched() -> None:
    by_rank = run_world(train_all, 3, kind="processes", transport="gloo", timeout=SECONDS)
    assert all(num_launches > num_apart > 0 for _, num_launches, num_apart in by_rank)
    for entry, runs in zip(CATALOGUE, zip(*(runs for runs, _, _ in by_rank), strict=True), strict=True):
        wanted = simulate(entry.rule(runs), entry.fit(regression("momentum")), 3, STEPS)
        assert_close(by_step(runs), wanted, 1e-9)
        if entry.lockstep:
            assert all(torch.equal(run.flats[-1], runs[0].flats[-1]) for run in runs), entry.name


def collectives(transport: Transport) -> list[float]:
    """Synchronous and asynchronous operations of floats, which are launched, and of whole numbers, which are staged."""
    pretend(transport)
    rank, size = transport.rank, transport.world_size
    other = transport.channel("other")
    tickets: list[Any] = []
    for number in range(20):
        tickets.append(transport.all_reduce(torch.full((5,), float(rank + number)), async_op=True))
        tickets.append(other.all_reduce(torch.full((5,), rank + number), async_op=True))
        tickets.append(other.all_reduce(torch.full((5,), float(rank + number)), async_op=True))
    found = [float(ticket.wait()[0]) for ticket in tickets]
    expected = [float(size * number + size * (size - 1) / 2) for number in range(20) for _ in range(3)]
    assert found == expected
    in_host_memory, num_apart = torch.full((2**20,), rank), Launched.num_apart
    transport.all_reduce_own(in_host_memory, ReduceOp.SUM)  # as of a bucket of parameters that are not on the GPU
    assert (in_host_memory == size * (size - 1) // 2).all()
    assert Launched.num_apart == num_apart + 1  # NCCL was not given it
    gathered = transport.all_gather(torch.full((rank + 1,), rank))
    assert [each.tolist() for each in gathered] == [[peer] * (peer + 1) for peer in range(size)]
    ticket = transport.all_gather(torch.full((rank + 1,), float(rank)), async_op=True)
    assert [len(each) for each in ticket.wait(SECONDS)] == [peer + 1 for peer in range(size)]
    transport.barrier()
    other.close()
    return found


def test_tickets_and_staged_tensors() -> None:
    results = run_world(collectives, 3, kind="processes", transport="gloo", timeout=SECONDS)
    assert len(results) == 3


def beside(transport: Transport) -> tuple[bool, float]:
    """What a thread beside training gets of a world of NCCL: a channel of Gloo, in host memory."""
    pretend(transport)
    transport._kind = "nccl"  # type: ignore[attr-defined]
    channel: Any = transport.host_channel("beside")
    total = float(channel.all_reduce(torch.full((3,), 1.0 + transport.rank))[0])
    is_gloo = channel._kind == "gloo"
    channel.close()
    transport._kind = "gloo"  # type: ignore[attr-defined]
    return is_gloo, total


def test_a_thread_beside_training_has_no_communicator_on_the_gpu() -> None:
    assert run_world(beside, 2, kind="processes", transport="gloo", timeout=SECONDS) == [(True, 3.0)] * 2


class Counting(nn.Module):
    """Adds its input to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("last", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x
        self.last.fill_(float(x))
        return self.weight * x


def totals(transport: Transport) -> list[tuple[list[float], list[float]]]:
    pretend(transport)
    ddp = DDP(Counting(), transport)
    found = []
    for number in range(4):
        if number == 2:
            ddp.module.total = ddp.module.total.clone()  # another tensor in the place of a buffer
        ddp(torch.tensor(10.0 * number + transport.rank)).sum().backward()
        found.append((ddp.module.total.tolist(), ddp.module.last.tolist()))
    ddp.close()
    return found


def test_rounds_begin_with_the_buffers_of_rank_0() -> None:
    for rank, found in enumerate(run_world(totals, 2, kind="processes", transport="gloo", timeout=SECONDS)):
        sums = [0.0, 10.0, 30.0, 60.0]  # of rank 0, with the input of the round
        assert found == [([total + rank] * 3, [10.0 * number + rank] * 2) for number, total in enumerate(sums)]


def fails(transport: Transport) -> str:
    """Rank 1 leaves with an error; the others hear of it at their next call."""
    pretend(transport)
    tensor = torch.ones(3)
    transport.all_reduce(tensor)
    if transport.rank == 1:
        raise ZeroDivisionError("rank 1 divides by zero")
    try:
        transport.submit_job("bucket 0 of round 1", lambda: transport.all_reduce(tensor)).wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_an_error_at_the_launch_says_what_the_operation_was_for() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run_world(fails, 3, kind="processes", transport="gloo", timeout=SECONDS)
    assert "rank 1" in str(raised.value)
