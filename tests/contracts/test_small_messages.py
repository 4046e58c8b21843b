"""Small all-reduces between hosts: summed in rank order, in one or two exchanges, without a byte too many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from murmura import TracedTransport, Transport, run_world
from murmura.collectives.ring import TINY_BYTES
from oracles.reduce import all_reduce
from worlds import SECONDS, ExchangeOnly


def sent_bytes(transport: Transport, numel: int) -> int:
    traced = TracedTransport(transport)
    ExchangeOnly(traced).all_reduce(torch.ones(numel))
    return sum(each.sent_bytes for each in traced.operations)


@pytest.mark.parametrize(("num_bytes", "times"), [(TINY_BYTES, 3.0), (TINY_BYTES + 16, 1.5), (80_000, 1.5)])
def test_only_what_is_tiny_goes_to_every_rank_whole(num_bytes: int, times: float) -> None:
    assert run_world(sent_bytes, 4, num_bytes // 4, timeout=SECONDS) == [times * num_bytes] * 4


def values(rank: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def sums(transport: Transport, numels: list[int]) -> list[Tensor]:
    return [transport.all_reduce(values(transport.rank, numel), "mean") for numel in numels]


def test_gloo_sums_small_tensors_in_rank_order_as_all_transports_do() -> None:
    numels = [1, 22, 1025, 5003]
    for found in run_world(sums, 3, numels, kind="processes", transport="gloo", timeout=SECONDS):
        for numel, each in zip(numels, found, strict=True):
            assert torch.equal(each, all_reduce([values(rank, numel) for rank in range(3)], "mean"))
