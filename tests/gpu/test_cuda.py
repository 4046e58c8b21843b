"""CUDA tensors on every transport, and streams: what was queued before an operation is in it, what follows sees it.

Run on a machine with a GPU: ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import murmura
from murmura import Transport, run_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

WORLDS: dict[str, dict[str, Any]] = {
    "threads": {"kind": "threads"},
    "shared_memory": {"kind": "processes"},
    "gloo": {"kind": "processes", "transport": "gloo"},
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int64]
LENGTHS = [0, 1, 3, 1001, 300_007]


def cuda(values: torch.Tensor) -> torch.Tensor:
    return values.to("cuda")


def all_collectives(transport: Transport) -> dict[str, Any]:
    """Every collective on CUDA tensors, as CPU results."""
    rank, size = transport.rank, transport.world_size
    out: dict[str, Any] = {}
    for dtype in DTYPES:
        for length in LENGTHS:
            tensor = cuda((torch.arange(length) % 5 + rank).to(dtype))
            transport.all_reduce(tensor)
            out[f"all_reduce {dtype} {length}"] = tensor.cpu()
    transposed = cuda(torch.arange(12.0).view(3, 4) + rank).t()
    transport.all_reduce(transposed, "max")
    out["transposed"] = transposed.cpu()
    tensor = cuda(torch.full((5,), float(rank)))
    transport.broadcast(tensor, src=size - 1)
    out["broadcast"] = tensor.cpu()
    tensor = cuda(torch.arange(7.0) + rank)
    transport.reduce(tensor, dst=0)
    out["reduce"] = tensor.cpu()
    out["reduce_scatter"] = transport.reduce_scatter(cuda(torch.arange(7.0) + rank)).cpu()
    out["all_gather"] = [each.cpu() for each in transport.all_gather(cuda(torch.full((rank + 1, 2), float(rank))))]
    whole = cuda(torch.zeros(size * 3, 2))
    out["all_gather_into"] = transport.all_gather_into(whole, cuda(torch.arange(6.0).view(3, 2) + rank)).cpu()
    own_part = cuda(torch.zeros(size * 5, dtype=torch.int16))
    own_part.chunk(size)[rank].fill_(rank + 1)
    out["all_gather_into, in place"] = transport.all_gather_into(own_part, own_part.chunk(size)[rank]).cpu()
    apart = [cuda(torch.zeros(4)) for _ in range(size)]
    transport.all_gather_into(apart, cuda(torch.full((4,), float(rank))))
    out["all_gather_into, apart"] = [each.cpu() for each in apart]
    for op in ("sum", "mean", "max"):
        chunk = cuda(torch.zeros(3))
        out[f"reduce_scatter_into, {op}"] = transport.reduce_scatter_into(
            chunk, cuda(torch.arange(3.0 * size) * (rank + 1)), op
        ).cpu()
    each = [cuda(torch.full((3,), float(10 * rank + other))) for other in range(size)]
    out["reduce_scatter_into, apart"] = transport.reduce_scatter_into(cuda(torch.zeros(3)), each).cpu()
    for op in ("band", "bor", "bxor"):
        bits = cuda(torch.arange(11, dtype=torch.int32) * 3 + rank)
        out[op] = transport.all_reduce(bits, op).cpu()
    gathered = transport.gather(cuda(torch.full((rank + 1,), rank)), dst=0)
    out["gather"] = None if gathered is None else [each.cpu() for each in gathered]
    target = cuda(torch.zeros(2))
    transport.scatter([cuda(torch.full((2,), float(i))) for i in range(size)] if rank == 0 else None, out=target)
    out["scatter"] = target.cpu()
    recvs = [cuda(torch.zeros(other + rank)) for other in range(size)]
    transport.all_to_all([cuda(torch.full((rank + i,), float(10 * rank + i))) for i in range(size)], recvs)
    out["all_to_all"] = [each.cpu() for each in recvs]
    if size > 1:
        received = cuda(torch.zeros(4))
        transport.exchange([(cuda(torch.full((4,), float(rank))), (rank + 1) % size)], [(received, (rank - 1) % size)])
        out["exchange"] = received.cpu()
    ticket = transport.all_reduce(cuda(torch.ones(9)), "mean", async_op=True)
    out["ticket"] = ticket.wait().cpu()
    transport.barrier()
    return out


def cpu_collectives(transport: Transport) -> dict[str, Any]:
    global cuda
    kept, cuda = cuda, lambda values: values  # type: ignore[assignment]
    try:
        return all_collectives(transport)
    finally:
        cuda = kept


def assert_same(one: Any, other: Any, what: str) -> None:
    if isinstance(one, list):
        assert len(one) == len(other), what
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{what}[{index}]")
    elif one is None:
        assert other is None, what
    else:
        assert one.dtype == other.dtype, what
        assert torch.equal(one, other), what


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("world", WORLDS)
def test_collectives_on_cuda_equal_those_on_the_cpu(world: str, size: int) -> None:
    on_cuda = run_world(all_collectives, size, timeout=60, **WORLDS[world])
    on_cpu = run_world(cpu_collectives, size, kind="processes", timeout=60)
    for rank in range(size):
        assert on_cuda[rank].keys() == on_cpu[rank].keys()
        for what in on_cuda[rank]:
            assert_same(on_cuda[rank][what], on_cpu[rank][what], f"rank {rank}: {what}")


def busy(milliseconds: int) -> None:
    """Keep the current stream busy for a while."""
    torch.cuda._sleep(2_000_000 * milliseconds)


WAYS = ("sync", "async", "queued")


def around_a_long_kernel(transport: Transport, way: str) -> list[float]:
    """Values that are only right if each operation waits for the kernels before it, and those after it for it.

    One that is "queued" is synchronous, while an asynchronous one of host memory is under way.
    """
    seen = []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(1_000_003, device="cuda")
        for step in range(5):
            busy(50)
            tensor.fill_(float(transport.rank + step))  # queued behind the long kernel
            before = transport.all_reduce(torch.ones(100_003), async_op=True) if way == "queued" else None
            if way == "async":
                transport.all_reduce(tensor, async_op=True).wait()
            else:
                transport.all_reduce(tensor)
            if before is not None:
                before.wait()
            doubled = tensor * 2  # queued behind the operation
            busy(10)
            least, most = doubled.min().item(), doubled.max().item()
            seen.append(least if least == most else float("nan"))
    return seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
def test_streams_are_kept_in_order(world: str, way: str) -> None:
    size = 3
    results = run_world(around_a_long_kernel, size, way, timeout=120, **WORLDS[world])
    expected = [2.0 * sum(rank + step for rank in range(size)) for step in range(5)]
    assert results == [expected] * size


def passed_on(transport: Transport) -> list[float]:
    """What comes from the rank before, each rank on a stream of its own; long kernels hold up every other one.

    It is only right if it is copied when the sender's stream has filled it, and before that stream fills it again.
    """
    rank, size = transport.rank, transport.world_size
    seen = []
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor, came = torch.zeros(1_000_003, device="cuda"), torch.zeros(1_000_003, device="cuda")
        for step in range(6):
            busy(50 * ((rank + step) % 2))
            tensor.fill_(float(rank + step))
            transport.exchange([(tensor, (rank + 1) % size)], [(came, (rank - 1) % size)])
            tensor.fill_(-1.0)
            least, most = came.min().item(), came.max().item()
            seen.append(least if least == most else float("nan"))
    return seen


def expected_from_before(size: int) -> list[list[float]]:
    return [[float((rank - 1) % size + step) for step in range(6)] for rank in range(size)]


@pytest.mark.parametrize("world", WORLDS)
def test_messages_wait_for_the_streams_of_both_ranks(world: str) -> None:
    assert run_world(passed_on, 3, timeout=120, **WORLDS[world]) == expected_from_before(3)


def nccl_alone(check: Callable[[Transport], Any]) -> Any:
    return run_world(check, 1, kind="processes", transport="nccl", timeout=60)[0]


def test_nccl_with_one_rank() -> None:
    alone = nccl_alone(all_collectives)
    expected = run_world(cpu_collectives, 1, kind="threads")[0]
    for what in expected:
        assert_same(alone[what], expected[what], what)


def test_nccl_streams_with_one_rank() -> None:
    assert run_world(around_a_long_kernel, 1, "sync", kind="processes", transport="nccl", timeout=120) == [
        [2.0 * step for step in range(5)]
    ]


def train(transport: Transport) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2)).double().cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    ddp = murmura.DDP(model, transport, bucket_size_bytes=1000)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        data = torch.Generator().manual_seed(100 * step + transport.rank)
        inputs = torch.randn(16, 8, generator=data, dtype=torch.float64).cuda()
        targets = torch.randn(16, 2, generator=data, dtype=torch.float64).cuda()
        optimizer.zero_grad()
        (ddp(inputs) - targets).square().mean().backward()
        optimizer.step()
    ddp.verify_in_sync()
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    ddp.close()
    return weights


@pytest.mark.parametrize("world", WORLDS)
def test_ddp_on_one_gpu_keeps_ranks_bit_equal(world: str) -> None:
    results = run_world(train, 3, timeout=120, **WORLDS[world])
    for rank, weights in enumerate(results):
        for index, (own, first) in enumerate(zip(weights, results[0], strict=True)):
            assert torch.equal(own, first), f"rank {rank}, parameter {index}"
