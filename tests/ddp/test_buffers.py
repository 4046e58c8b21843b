"""Buffers: rank 0's at the first forward of a round, or everybody's own."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

from ddp.models import all_equal, errors_on, on_ranks, values, weight
from murmura import DDP, Transport, UsageError


class Counter(nn.Module):
    """Sees inputs: the last one stays in a buffer. `replaces` puts a new tensor there, as moving averages often do."""

    def __init__(self, replaces: bool = False) -> None:
        super().__init__()
        self.inner = weight()
        self.replaces = replaces
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("unseen", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.seen = self.seen * 10 + x.detach().sum()
        else:
            self.seen.mul_(10).add_(x.detach().sum())
        return self.inner(x)


def forward_thrice(transport: Transport, broadcast_buffers: bool, replaces: bool) -> list[float]:
    ddp = DDP(Counter(replaces), transport, broadcast_buffers=broadcast_buffers)
    seen = []
    for _ in range(3):
        ddp(torch.full((1, 1), transport.rank + 1.0)).sum().backward()
        seen.append(ddp.module.seen.item())
    return seen


@pytest.mark.parametrize("replaces", [False, True], ids=["in place", "replaced"])
def test_buffers_are_those_of_rank_0_at_the_first_forward_of_a_round(replaces: bool) -> None:
    assert on_ranks(forward_thrice, 3, True, replaces) == [[1, 11, 111], [2, 12, 112], [3, 13, 113]]


@pytest.mark.parametrize("replaces", [False, True], ids=["in place", "replaced"])
def test_buffers_stay_local_if_so_wished(replaces: bool) -> None:
    assert on_ranks(forward_thrice, 3, False, replaces) == [[1, 11, 111], [2, 22, 222], [3, 33, 333]]


@pytest.mark.parametrize("replaces", [False, True], ids=["in place", "replaced"])
@pytest.mark.parametrize("algorithm", ["local_sgd:interval=1", "diloco:interval=1"])
def test_buffers_are_averaged_with_the_weights(algorithm: str, replaces: bool) -> None:
    def run(transport: Transport) -> list[float]:
        with closing(DDP(Counter(replaces), transport, algorithm=algorithm)) as ddp:
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            seen = []
            for _ in range(3):
                ddp(torch.full((1, 1), transport.rank + 1.0)).sum().backward()
                optimizer.step()
                seen.append(ddp.module.seen.item())
            return seen

    assert on_ranks(run, 3) == [[2, 22, 222]] * 3


@pytest.mark.parametrize(("broadcast_buffers", "wanted"), [(True, [1, 1, 1]), (False, [1, 2, 3])])
def test_buffers_are_synced_on_demand_as_a_round_would(broadcast_buffers: bool, wanted: list[float]) -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(Counter(), transport, broadcast_buffers=broadcast_buffers)
        ddp.module.seen.fill_(transport.rank + 1)
        ddp.sync_buffers()
        return ddp.module.seen.item()

    assert on_ranks(run, 3) == wanted


def test_buffers_that_are_not_saved_are_broadcast_too() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(Counter(), transport)
        ddp.module.unseen.fill_(transport.rank + 5)
        ddp(torch.ones(1, 1)).sum().backward()
        return ddp.module.unseen.tolist()

    assert on_ranks(run, 2) == [[5.0], [5.0]]


def test_buffers_move_once_a_round_and_only_when_training() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(Counter(), transport)
        x = torch.full((1, 1), transport.rank + 1.0)
        seen = []
        with torch.no_grad():
            ddp(x)
        ddp.eval()(x)
        seen.append(ddp.module.seen.item())  # each its own
        ddp.train()
        first, second = ddp(x), ddp(x)  # rank 0's at the first, each its own at the second
        seen.append(ddp.module.seen.item())
        (first + second).sum().backward()
        with ddp.no_sync():
            ddp(x).sum().backward()  # opens the next round
            ddp(x).sum().backward()
        seen.append(ddp.module.seen.item())
        return seen

    zero, one = on_ranks(run, 2)
    assert zero == [11, 1111, 111111]
    assert one == [22, 1122, 111122]


def norm_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def test_pytorch_175024_two_forwards_with_batch_norm_before_one_backward() -> None:
    """Broadcasting buffers again before the backward would modify in place what the graph has saved."""

    def run(transport: Transport) -> tuple[list[Tensor], Tensor]:
        ddp = DDP(norm_model(), transport)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            one = ddp(values(5, 3, seed=4 * step + transport.rank))
            other = ddp(values(5, 3, seed=4 * step + 2 + transport.rank))
            (one - other).square().mean().backward()
            optimizer.step()
        ddp.verify_in_sync()
        return [parameter.detach() for parameter in ddp.parameters()], ddp.module[1].num_batches_tracked

    results = on_ranks(run, 2)
    assert all_equal(results)
    assert results[0][1].item() == 6


def test_two_forwards_with_batch_norm_then_two_backwards() -> None:
    def run(transport: Transport) -> list[Tensor]:
        ddp = DDP(norm_model(), transport)
        one, other = (ddp(values(5, 3, seed=transport.rank + 2 * number)) for number in range(2))
        one.square().mean().backward()
        other.square().mean().backward()
        return [parameter.grad for parameter in ddp.parameters()]

    assert all_equal(on_ranks(run, 2))


def test_evaluation_uses_the_buffers_of_rank_0_after_broadcast_parameters() -> None:
    def run(transport: Transport) -> tuple[Tensor, Tensor]:
        ddp = DDP(norm_model(), transport)
        ddp(values(5, 3, seed=transport.rank)).sum().backward()
        own = ddp.module[1].running_mean.clone()
        ddp.broadcast_parameters(1)
        return own, ddp.module[1].running_mean

    results = on_ranks(run, 2)
    assert not torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][0])
    assert torch.equal(results[1][1], results[1][0])


@pytest.mark.parametrize("how", ["None", "deleted", "its module"])
def test_a_buffer_that_is_gone_is_named(how: str) -> None:
    def run(transport: Transport) -> None:
        model = nn.ModuleDict({"body": nn.Sequential(weight(), nn.BatchNorm1d(1))})
        ddp = DDP(model, transport)
        if how == "None":
            model["body"][1].running_mean = None
        elif how == "deleted":
            del model["body"][1].running_mean
        else:
            del model["body"][1]
        ddp(torch.ones(2, 1))

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert "buffer 'body.1.running_mean'" in str(error)
