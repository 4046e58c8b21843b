"""Any aggregator as the algorithm of a model: the parameter server trains too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ddp.models import Heads, all_equal, fill, on_ranks, values, weights_of
from murmura import (
    DDP,
    AggregateGradients,
    AllReduceAggregator,
    DistributedConfig,
    GradientAggregator,
    LocalAggregator,
    ParameterServer,
    Transport,
    run_world,
)
from worlds import SECONDS

Make = Callable[[DistributedConfig, Transport], GradientAggregator]


def train(transport: Transport, make: Make | None) -> Tensor:
    """Accumulated, clipped, with heads that only some ranks use; `None` is plain gradient all-reduce."""
    algorithm = None
    if make is not None:
        config = DistributedConfig(world_size=transport.world_size, rank=transport.rank)
        algorithm = AggregateGradients(make(config, transport))
    ddp = DDP(fill(Heads().double(), seed=transport.rank), transport, algorithm=algorithm, bucket_size_bytes=200)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        inputs = values(4, 4, seed=10 * step + transport.rank, dtype=torch.float64)
        with ddp.no_sync():
            ddp(inputs, use=[0, 1]).square().mean().backward()
        ddp(inputs + 1, use=[step % 3, (step + transport.rank) % 3]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm=1.0)
        optimizer.step()
    assert len(ddp._replica.buckets) > 1 or transport.world_size == 1
    ddp.close()
    return weights_of(ddp.module)


@pytest.mark.parametrize("make", [AllReduceAggregator, ParameterServer])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_an_aggregator_trains_to_the_bits_of_gradient_all_reduce(make: Make, num_ranks: int) -> None:
    assert all_equal([*on_ranks(train, num_ranks, make), *on_ranks(train, num_ranks, None)])


def test_the_parameter_server_trains_processes_over_gloo() -> None:
    """Gloo's own all-reduce may sum in another order than the server, in double precision to no effect."""
    results = run_world(train, 2, ParameterServer, kind="processes", transport="gloo", timeout=SECONDS)
    assert all_equal(results)
    torch.testing.assert_close(results[0], on_ranks(train, 2, None)[0], rtol=0, atol=1e-9)


class Median(GradientAggregator):
    """A user's own: of three ranks the middle one, element by element."""

    def __init__(self, config: DistributedConfig, transport: Transport) -> None:
        self.transport = transport

    def aggregate(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(self.transport.all_gather(each)).median(dim=0).values for each in gradients]


def test_a_users_own_aggregator_needs_no_change_here() -> None:
    def run(transport: Transport) -> float:
        config = DistributedConfig(world_size=3, rank=transport.rank)
        ddp = DDP(fill(torch.nn.Linear(1, 1)), transport, algorithm=AggregateGradients(Median(config, transport)))
        ddp(torch.tensor([[(1.0, 2.0, 1000.0)[transport.rank]]])).sum().backward()
        return ddp.module.weight.grad.item()

    assert on_ranks(run, 3) == [2.0, 2.0, 2.0]


def test_a_local_aggregator_leaves_every_rank_to_itself() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(fill(torch.nn.Linear(1, 1)), transport, algorithm=AggregateGradients(LocalAggregator()))
        ddp(torch.tensor([[float(transport.rank)]])).sum().backward()
        return ddp.module.weight.grad.item()

    assert on_ranks(run, 3) == [0.0, 1.0, 2.0]
