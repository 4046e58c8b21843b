"""During backward, by hand, or by hand with all in flight: one path, and the same bits.

The buckets are many, small and equal in size and dtype, and gradients come in another order on every rank, so that a
bucket that met another one would go unnoticed but for its values.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp.models import all_equal, fill, gradients_of, values, weights_of
from murmura import DDP, Transport, run_world
from oracles import ddp as oracle
from worlds import SECONDS

NUM_BRANCHES = 12
WIDTH = 5
BUCKET_BYTES = WIDTH * WIDTH * 4  # one matrix


class Branches(nn.Module):
    """A sum over equal branches; which is computed first, and so comes last in backward, is up to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BRANCHES))

    def forward(self, x: Tensor, rotation: int) -> Tensor:
        out = torch.zeros_like(x)
        for index in range(NUM_BRANCHES):
            out = out + self.branches[(5 * index + rotation) % NUM_BRANCHES](x).tanh()
        return out


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(values(3, WIDTH, seed=100 * step + rank), rotation=3 * rank + step).square().mean()


def during_backward(ddp: DDP, backward: Callable[[], None]) -> None:
    backward()


def by_hand(ddp: DDP, backward: Callable[[], None]) -> None:
    with ddp.no_sync():
        backward()
    ddp.sync_gradients()


def by_hand_all_in_flight(ddp: DDP, backward: Callable[[], None]) -> None:
    with ddp.no_sync():
        backward()
    ddp.overlapped_sync_gradients()


WAYS = (during_backward, by_hand, by_hand_all_in_flight)


def train(transport: Transport, way: Callable[..., None], num_steps: int = 10) -> list[object]:
    """The gradients of each step and the weights at the end."""
    ddp = DDP(fill(Branches()), transport, bucket_size_bytes=BUCKET_BYTES)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    seen: list[object] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        way(ddp, lambda step=step: loss(ddp, transport.rank, step).backward())
        assert len(ddp._replica.buckets) == NUM_BRANCHES
        assert len({bucket.flat.numel() for bucket in ddp._replica.buckets}) == 1
        seen.append(gradients_of(ddp.module))
        optimizer.step()
    ddp.close()
    return [*seen, weights_of(ddp.module)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_ways_give_the_same_bits(num_ranks: int) -> None:
    results = [result for way in WAYS for result in run_world(train, num_ranks, way, timeout=SECONDS)]
    assert all_equal(results)
    losses = [lambda model, rank=rank: loss(model, rank, 0) for rank in range(num_ranks)]
    wanted = oracle.mean_gradients(fill(Branches()), losses)
    torch.testing.assert_close(results[0][0], wanted)


def train_in_all_ways(transport: Transport) -> list[list[object]]:
    return [train(transport, way) for way in WAYS]


def test_all_ways_give_the_same_bits_in_processes() -> None:
    by_rank = run_world(train_in_all_ways, 2, kind="processes", timeout=SECONDS)
    results = [result for of_rank in by_rank for result in of_rank]
    assert all_equal([*results, *run_world(train, 2, during_backward, timeout=SECONDS)])


def alternate(ddp: DDP, backward: Callable[[], None]) -> None:
    """Each rank in its own way, and another one in every round."""
    choice = ddp.transport.rank + ddp.algorithm_state_dict()["round"]
    WAYS[choice % len(WAYS)](ddp, backward)


def test_ranks_may_mix_the_ways() -> None:
    first = run_world(train, 3, during_backward, timeout=SECONDS)
    assert all_equal([*first, *run_world(train, 3, alternate, timeout=SECONDS)])
