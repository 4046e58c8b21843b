"""Several hosts, however the ranks lie on them: a sample of the contract, and what only hosts make a question.

The whole suite runs on two placements in the long run (see `worlds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contracts.cases import Case, digest, kinds_of, random
from contracts.test_broadcast import broadcast_cases
from contracts.test_exchange import swap_with_all
from contracts.test_gather import gather_all, reduce_all, scatter_all
from contracts.test_transports import reduce_cases
from ddp.models import fill
from murmura import (
    DDP,
    GradientAllReduceAlgorithm,
    HierarchicalTransport,
    ProcessGroupTransport,
    SharedMemoryTransport,
    Transport,
    run_world,
)
from murmura.transports.hierarchical import groups as hierarchical
from worlds import SECONDS

PLACEMENTS = ([0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 2, 2])
SEGMENT_BYTES = 64 * 1024  # so that several of them make no long test
SEVERAL_SEGMENTS = 70_001  # elements, of any dtype

QUICK = ([0, 1, 0, 1],)  # the others take their turn in the long grid
each_placement = pytest.mark.parametrize(
    "hosts", [pytest.param(hosts, marks=() if hosts in QUICK else pytest.mark.slow) for hosts in PLACEMENTS], ids=str
)


def run(fn: Callable[..., Any], hosts: Sequence[int], *args: Any) -> list[Any]:
    return run_world(fn, len(hosts), *args, kind="processes", transport="hierarchical", hosts=hosts, timeout=SECONDS)


def run_threads(fn: Callable[..., Any], hosts: Sequence[int], *args: Any) -> list[Any]:
    return run_world(fn, len(hosts), *args, hosts=hosts, timeout=SECONDS)


EXACT = [
    *(
        Case(*kind, exact=True)
        for kind in kinds_of((0, 1, 3, 1001), (torch.float32, torch.bfloat16, torch.int16, torch.complex64, torch.bool))
    ),
    *(Case(SEVERAL_SEGMENTS, torch.float32, op, exact=True) for op in ("sum", "mean", "max")),
]


def cut_short(transport: Transport) -> None:
    """Let segments be short, in the process of a rank."""
    if isinstance(transport, HierarchicalTransport):
        hierarchical.SEGMENT_BYTES = SEGMENT_BYTES


def do_everything(transport: Transport) -> list[Any]:
    cut_short(transport)
    return [
        reduce_cases(transport, EXACT, ["ordinary", "allocated"]),
        broadcast_cases(transport),
        swap_with_all(transport, 1003),
        reduce_all(transport, True),
        gather_all(transport),
        scatter_all(transport),
        transport.barrier(),
    ]


@each_placement
def test_every_operation_gives_what_threads_give(hosts: Sequence[int]) -> None:
    """Of whole numbers, whose sums are exact in any order."""
    assert run(do_everything, hosts) == run_threads(do_everything, hosts)


def sum_random(transport: Transport) -> dict[Any, tuple[str, float]]:
    """Digests, and how far the sum is from the one in float64, in units of the largest term."""
    cut_short(transport)
    results = {}
    for dtype in (torch.float16, torch.float32, torch.float64, torch.complex64):
        for length in (1001, SEVERAL_SEGMENTS):
            wide = torch.complex128 if dtype.is_complex else torch.float64
            inputs = [random(length, dtype, rank) for rank in range(transport.world_size)]
            exact = torch.stack([each.to(wide) for each in inputs]).sum(dim=0)
            total = transport.all_reduce(inputs[transport.rank].clone())
            error = (total.to(wide) - exact).abs().max() / torch.stack(inputs).abs().max()
            results[dtype, length] = digest(total), error.item()
    return results


@each_placement
def test_every_rank_holds_the_same_bits(hosts: Sequence[int]) -> None:
    by_rank = run(sum_random, hosts)
    for key, (bits, error) in by_rank[0].items():
        assert {results[key][0] for results in by_rank} == {bits}, key
        assert error < 4 * torch.finfo(key[0]).eps, key


@pytest.mark.slow
def test_bits_are_the_same_in_every_run() -> None:
    first, second = (run(sum_random, [0, 1, 0, 1])[0] for _ in range(2))
    assert first == second


def average_long(transport: Transport) -> list[float]:
    numel = 5 * hierarchical.SEGMENT_BYTES // 8 + 1  # in float32, two segments and a half
    mean = transport.all_reduce(torch.arange(numel).remainder_(1000).float() + transport.rank, "mean")
    return [(mean - torch.arange(numel).remainder_(1000)).min().item(), mean.max().item()]


def test_segments_of_their_usual_length() -> None:
    assert run(average_long, [0, 0, 1]) == [[1.0, 1000.0]] * 3


# Messages


def wait_in_a_circle(transport: Transport) -> float:
    """Rank 1 takes what rank 0 sends only after rank 2 has sent, which waits for rank 0 too."""
    tensor, other = torch.full((3,), float(transport.rank)), torch.zeros(3)
    if transport.rank == 0:
        transport.exchange([(tensor, 1), (tensor, 2)], [])
    elif transport.rank == 1:
        transport.recv(tensor, 2)
        transport.recv(other, 0)
    elif transport.rank == 2:
        transport.recv(other, 0)
        transport.send(tensor, 1)
    return tensor[0].item()


@pytest.mark.parametrize("hosts", [pytest.param([0, 0, 1], marks=pytest.mark.slow), [0, 1, 0]], ids=str)
def test_messages_inside_a_host_and_to_another_do_not_wait_for_each_other(hosts: Sequence[int]) -> None:
    assert run(wait_in_a_circle, hosts) == [0.0, 2.0, 2.0]


# Parts of the world


def split(transport: Transport) -> list[Any]:
    """What each part of the world is, and what it sums."""
    hosts = list(dict.fromkeys(transport.hosts))
    of_host = [[rank for rank, host in enumerate(transport.hosts) if host == each] for each in hosts]
    parts = {
        "channel": range(transport.world_size),
        **{f"host {host}": ranks for host, ranks in zip(hosts, of_host, strict=True)},
        "leaders": [ranks[0] for ranks in of_host],
        "backwards": range(transport.world_size)[::-1],
        "all but rank 1": [rank for rank in range(transport.world_size) if rank != 1],
        "rank 1": [1],
    }
    seen: list[Any] = []
    for name, ranks in parts.items():
        part = transport.split(name, ranks)
        if part is not None:
            total = part.all_reduce(torch.full((5,), 2.0**transport.rank))[0].item()
            again = part.channel("again").broadcast(torch.tensor(float(transport.rank)), part.world_size - 1).item()
            seen.append((name, type(part), list(part.hosts), part.rank, total, again))
    return seen


@each_placement
def test_a_part_of_the_world_is_what_its_hosts_ask_for(hosts: Sequence[int]) -> None:
    seen = [told for of_rank in run(split, hosts) for told in of_rank]
    assert [told[:1] + told[2:] for told in seen] == [
        told[:1] + told[2:] for of_rank in run_threads(split, hosts) for told in of_rank
    ]
    for name, kind, part_hosts, *_ in seen:
        wanted = HierarchicalTransport
        if len(set(part_hosts)) == 1:
            wanted = SharedMemoryTransport
        elif len(set(part_hosts)) == len(part_hosts):
            wanted = ProcessGroupTransport
        assert kind is wanted, name


def know_hosts(transport: Transport) -> tuple[list[int], float]:
    return list(transport.hosts), transport.all_reduce(torch.ones(3), "mean")[0].item()


@pytest.mark.parametrize("hosts", [[0], [0, 0], [5, 2], [3, 3, 1]], ids=str)
def test_worlds_that_need_no_hierarchy_and_hosts_by_any_number(hosts: Sequence[int]) -> None:
    assert run(know_hosts, hosts) == [(hosts, 1.0)] * len(hosts)


# Training


def train(transport: Transport, steps: int) -> list[Tensor]:
    model = fill(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))).double()
    generator = torch.Generator().manual_seed(transport.rank)
    # By the transport's hierarchy, and by the algorithm's own
    algorithm = GradientAllReduceAlgorithm(hierarchical=transport.world_size % 2 == 1)
    ddp = DDP(model, transport, algorithm=algorithm, bucket_size_bytes=1024)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        inputs = torch.randn(6, 8, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
    ddp.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "hosts",
    [[0, 0, 1, 1], *(pytest.param(each, marks=pytest.mark.slow) for each in ([0, 1, 0, 1], [0, 0, 1]))],
    ids=str,
)
def test_training_is_bit_equal_on_all_ranks_and_that_of_threads(hosts: Sequence[int]) -> None:
    by_rank, threads = run(train, hosts, 20), run_threads(train, hosts, 20)
    for parameters in by_rank:
        for mine, first, wanted in zip(parameters, by_rank[0], threads[0], strict=True):
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-9)
