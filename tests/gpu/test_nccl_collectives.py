"""NCCL with 2, 3 and 4 ranks on one GPU: CUDA tensors, streams with long kernels before and after, decorators."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import murmura
from gpu.test_cuda import (
    WAYS,
    all_collectives,
    around_a_long_kernel,
    assert_same,
    cpu_collectives,
    expected_from_before,
    passed_on,
    train,
)
from murmura import (
    CollectiveMismatch,
    ThrottledTransport,
    TracedTransport,
    Transport,
    run_world,
)
from murmura.tools.one_gpu import OneGPU
from murmura.transports.process_group import Check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(180),
]

LONG_CYCLES = 100_000_000  # about 50 ms


def test_collectives_on_cuda_equal_those_on_the_cpu(nccl: OneGPU) -> None:
    on_cuda = nccl.run(all_collectives)
    on_cpu = run_world(cpu_collectives, nccl.num_ranks, kind="threads", timeout=60)
    for rank in range(nccl.num_ranks):
        for what in on_cpu[rank]:
            assert_same(on_cuda[rank][what], on_cpu[rank][what], f"rank {rank}: {what}")


@pytest.mark.parametrize("way", WAYS)
def test_streams_are_kept_in_order(nccl: OneGPU, way: str) -> None:
    size = nccl.num_ranks
    expected = [2.0 * sum(rank + step for rank in range(size)) for step in range(5)]
    assert nccl.run(around_a_long_kernel, way) == [expected] * size


def test_messages_wait_for_the_streams_of_both_ranks(nccl: OneGPU) -> None:
    assert nccl.run(passed_on) == expected_from_before(nccl.num_ranks)


def compared(transport: Transport, deviant: int) -> tuple[float, str]:
    """A sum of ranks that compare their calls, and what they are told when one of them calls something else."""
    channel = transport.channel("compared")
    channel.check = Check.ALWAYS
    total = float(channel.all_reduce(torch.full((3,), float(transport.rank), device="cuda"))[0])
    try:
        if transport.rank == deviant:
            channel.broadcast(torch.ones(5, device="cuda"), 0)
        else:
            channel.all_reduce(torch.ones(3, device="cuda"))
    except CollectiveMismatch as error:
        return total, f"{error.calls[deviant]}; {error.calls[(deviant + 1) % transport.world_size]}"
    finally:
        channel.close()
    return total, "nothing"


def test_ranks_that_always_compare_find_another_call(nccl: OneGPU) -> None:
    size = nccl.num_ranks
    told = "broadcast(src=0) of float32[5]; all_reduce(sum) of float32[3]"
    assert nccl.run(compared, 1) == [(size * (size - 1) / 2, told)] * size


def means(transport: Transport) -> dict[str, bool]:
    """Whether a mean on the GPU has the bits of a sum that is divided, as a CPU does it."""
    found = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        values = torch.randn(10_007, generator=torch.Generator().manual_seed(transport.rank)).to(dtype).cuda()
        wide = values.float() if dtype is torch.float16 else values.clone()
        transport.all_reduce(wide)
        transport.all_reduce(values, "mean")
        found[str(dtype)] = torch.equal(values.cpu(), wide.cpu().div_(transport.world_size).to(dtype))
    return found


def test_a_mean_is_the_sum_divided(nccl: OneGPU) -> None:
    for found in nccl.run(means):
        assert all(found.values()), found


def test_ddp_keeps_ranks_bit_equal(nccl: OneGPU) -> None:
    results = nccl.run(train)
    for weights in results[1:]:
        assert all(torch.equal(own, first) for own, first in zip(weights, results[0], strict=True))


def host_does_not_wait(transport: Transport) -> tuple[float, float, float]:
    """How long the host took to launch operations behind a long kernel, until they were done, and what came."""
    tensor = torch.full((1_000_003,), float(transport.rank), device="cuda")
    transport.all_reduce(tensor.clone())
    torch.cuda.synchronize()
    transport.barrier()
    torch.cuda._sleep(6 * LONG_CYCLES)
    began = time.perf_counter()
    transport.all_reduce(tensor)
    ticket = transport.all_reduce(tensor.clone(), async_op=True)
    launched = time.perf_counter() - began
    assert not ticket.done()
    total = ticket.wait()[0]  # the current stream waits
    torch.cuda.synchronize()
    return launched, time.perf_counter() - began, float(total)


def test_the_host_does_not_wait_for_an_operation(nccl: OneGPU) -> None:
    size = nccl.num_ranks
    for launched, done, total in nccl.run(host_does_not_wait):
        assert launched < 0.05 < 0.2 < done
        assert total == size * size * (size - 1) / 2


WRAPS = {"traced": TracedTransport, "throttled": partial(ThrottledTransport, bandwidth="10gbit")}
on_each = pytest.mark.parametrize("wrap", WRAPS)


def wrapped_collectives(transport: Transport, wrap: str) -> dict[str, Any]:
    return all_collectives(WRAPS[wrap](transport))


@on_each
def test_collectives_go_through_a_decorator(nccl: OneGPU, wrap: str) -> None:
    on_cuda = nccl.run(wrapped_collectives, wrap)
    on_cpu = run_world(cpu_collectives, nccl.num_ranks, kind="threads", timeout=60)
    for rank in range(nccl.num_ranks):
        for what in on_cpu[rank]:
            assert_same(on_cuda[rank][what], on_cpu[rank][what], f"rank {rank}: {what}")


def two_wrapped(transport: Transport, wrap: str) -> tuple[list[torch.Tensor], list[float]]:
    """The weights of two models on channels of a decorator, and what came on a third, behind long kernels."""
    wrapped = WRAPS[wrap](transport)
    torch.manual_seed(0)
    models = [nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)]).cuda() for _ in range(2)]
    ddps = [murmura.DDP(model, wrapped, bucket_size_bytes=300_000) for model in models]
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.05) for ddp in ddps]
    own, totals = wrapped.channel("the user's own"), []
    for number in range(10):
        data = torch.Generator().manual_seed(100 * number + transport.rank)
        x = torch.randn(8, 256, generator=data).cuda()
        torch.cuda._sleep(LONG_CYCLES // 5)
        losses = [ddp(x).square().mean() for ddp in ddps]
        (losses[0] + losses[1]).backward()
        torch.cuda._sleep(LONG_CYCLES // 10)
        ticket = own.all_reduce(torch.full((5,), float(number + transport.rank), device="cuda"), async_op=True)
        wrapped.all_reduce(losses[0].detach())
        totals.append(ticket.wait())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ddp in ddps:
        ddp.verify_in_sync()
        ddp.close()
    own.close()
    weights = [parameter.detach().cpu() for model in models for parameter in model.parameters()]
    return weights, [float(total[0]) for total in totals]


@on_each
def test_models_on_channels_of_a_decorator_stay_bit_equal(nccl: OneGPU, wrap: str) -> None:
    size, results = nccl.num_ranks, nccl.run(two_wrapped, wrap)
    for weights, totals in results:
        assert all(torch.equal(own, first) for own, first in zip(weights, results[0][0], strict=True))
        assert totals == [size * number + size * (size - 1) / 2 for number in range(10)]


def slow_exchange(transport: Transport) -> tuple[float, bool, float]:
    """Seconds of an exchange of 5 MB behind a long kernel, whether the device had done it then, and what came."""
    link = ThrottledTransport(transport, "1gbit")
    rank, size = transport.rank, transport.world_size
    tensor, came = torch.empty(1_250_000, device="cuda"), torch.empty(1_250_000, device="cuda")
    link.exchange([(tensor, (rank + 1) % size)], [(came, (rank - 1) % size)])  # NCCL connects
    torch.cuda.synchronize()
    transport.barrier()
    began = time.perf_counter()
    torch.cuda._sleep(6 * LONG_CYCLES)
    tensor.fill_(float(rank))
    link.exchange([(tensor, (rank + 1) % size)], [(came, (rank - 1) % size)])
    seconds, is_done = time.perf_counter() - began, torch.cuda.current_stream().query()
    return seconds, is_done, float(came[-1])


def test_the_time_of_a_slow_link_begins_when_the_tensors_are_there(nccl: OneGPU) -> None:
    size = nccl.num_ranks
    for rank, (seconds, is_done, came) in enumerate(nccl.run(slow_exchange)):
        assert seconds > 0.2 + 0.04  # a kernel of about 300 ms, and 5 MB at 1 Gbit/s
        assert is_done
        assert came == (rank - 1) % size


def running_means(transport: Transport) -> list[float]:
    """What batch normalisation has gathered after each round, each rank with data of its own, behind long kernels."""
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 1)).cuda()
    ddp = murmura.DDP(model, transport)
    noise = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    noise -= noise.mean(0)
    found = []
    for number in range(4):
        if number == 2:
            model[0].running_mean = model[0].running_mean.clone()  # another tensor in the place of a buffer
        torch.cuda._sleep(LONG_CYCLES // 10)
        ddp((noise + 10.0 * number + transport.rank).cuda()).square().sum().backward()
        found.append(float(model[0].running_mean[0]))
    ddp.close()
    return found


def test_every_round_begins_with_the_buffers_of_rank_0(nccl: OneGPU) -> None:
    for rank, found in enumerate(nccl.run(running_means)):
        mean, expected = 0.0, []
        for number in range(4):
            expected.append(0.9 * mean + 0.1 * (10.0 * number + rank))
            mean = 0.9 * mean + number
        assert found == pytest.approx(expected, abs=1e-4)


def on_several_streams(transport: Transport) -> bool:
    """Whether a bucket that was filled on two streams holds the mean of both parts."""
    layers = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(2)]).cuda()
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(1.0)
    ddp = murmura.DDP(layers, transport)
    other = torch.cuda.Stream()
    ok = True
    for number in range(4):
        for layer in layers:
            layer.weight.grad = None
        x = torch.full((1, 256), float(number + transport.rank), device="cuda")
        torch.cuda.synchronize()
        first = layers[0](x).sum()
        with torch.cuda.stream(other):
            torch.cuda._sleep(LONG_CYCLES)
            second = layers[1](x).sum()
        (first + second.to(first.device)).backward()
        expected = number + (transport.world_size - 1) / 2
        ok = ok and all(bool((layer.weight.grad == expected).all()) for layer in layers)
    ddp.close()
    return ok


def test_gradients_of_several_streams_meet_in_a_bucket(nccl: OneGPU) -> None:
    assert all(nccl.run(on_several_streams))


NUM_LAYERS, NUM_ROUNDS = 3, 4


def with_unused_layers(transport: Transport) -> list[list[float | None]]:
    """The gradient of each layer in each round, in which every rank uses one of them, behind long kernels."""
    layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(NUM_LAYERS)]).cuda()
    ddp = murmura.DDP(layers, transport)
    found: list[list[float | None]] = []
    for number in range(NUM_ROUNDS):
        ddp.zero_grad()
        torch.cuda._sleep(LONG_CYCLES // 5)
        x = torch.full((1, 64), 1.0 + transport.rank, device="cuda")
        layers[(transport.rank + number) % NUM_LAYERS](x).sum().backward()
        gradients = [layer.weight.grad for layer in layers]
        found.append([None if each is None else float(each.mean()) for each in gradients])
    ddp.close()
    return found


def test_layers_that_some_or_all_ranks_do_not_use(nccl: OneGPU) -> None:
    size = nccl.num_ranks
    expected: list[list[float | None]] = []
    for number in range(NUM_ROUNDS):
        users = [[rank for rank in range(size) if (rank + number) % NUM_LAYERS == layer] for layer in range(NUM_LAYERS)]
        expected.append([sum(rank + 1 for rank in each) / size if each else None for each in users])
    for found in nccl.run(with_unused_layers):
        for gradients, wanted in zip(found, expected, strict=True):
            assert [each is None for each in gradients] == [each is None for each in wanted]
            assert [each for each in gradients if each] == pytest.approx([each for each in wanted if each])


def captured_meanwhile(transport: Transport) -> tuple[float, float]:
    """What a graph computes that was captured while an operation was under way, and what the operation gave."""
    reduced, given = torch.ones(1000, device="cuda"), torch.full((1000,), 3.0, device="cuda")
    transport.all_reduce(reduced.clone())
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda._sleep(12 * LONG_CYCLES)
    transport.all_reduce(reduced)
    with torch.cuda.stream(stream):
        graph.capture_begin()
        doubled = given * 2
        time.sleep(0.4)  # the watchdog looks several times
        graph.capture_end()
    graph.replay()
    torch.cuda.synchronize()
    return float(doubled[0]), float(reduced[0])


def test_a_graph_may_be_captured_while_an_operation_is_under_way(nccl: OneGPU) -> None:
    assert nccl.run(captured_meanwhile) == [(6.0, float(nccl.num_ranks))] * nccl.num_ranks
