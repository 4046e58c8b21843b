"""Step by step beside torch's own DistributedDataParallel, on Gloo, in the same processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp.models import all_equal, weights_of
from equivalence.cases import MODELS, OPTIMIZERS, Case, loss_of
from murmura import DDP, Transport, run_world
from worlds import SECONDS, torch_group


def train_both(transport: Transport, cases: Sequence[Case], store: str) -> list[tuple[list[float], Tensor]]:
    """By case, the largest difference of any weight after each step, and the last weights."""
    with torch_group(transport, store):
        return [train_case(transport, case) for case in cases]


def train_case(transport: Transport, case: Case) -> tuple[list[float], Tensor]:
    ours = DDP(case.make_model(seed=transport.rank), transport, bucket_size_bytes=case.bucket_bytes)
    theirs = DistributedDataParallel(case.make_model(seed=transport.rank), bucket_cap_mb=0.001)
    optimizers = [case.make_optimizer(ours), case.make_optimizer(theirs)]
    differences = []
    for step in range(case.num_steps):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, case.shard(2 * step, transport.rank)).backward()
            loss_of(model, case.shard(2 * step + 1, transport.rank)).backward()
            optimizer.step()
        differences.append((weights_of(ours.module) - weights_of(theirs.module)).abs().max().item())
    # torch's wrapper takes over rank 0's buffers at every forward, ours at the first of a round.
    if transport.rank == 0:
        for name, buffer in ours.module.named_buffers():
            torch.testing.assert_close(buffer, theirs.module.get_buffer(name))
    ours.close()
    return differences, weights_of(ours.module)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("transport", "num_ranks", "names"),
    [
        ("gloo", 3, [("transformer", "adamw"), ("cnn", "momentum")]),
        pytest.param("shared_memory", 2, list(itertools.product(MODELS, OPTIMIZERS)), marks=pytest.mark.slow),
        pytest.param("gloo", 4, list(itertools.product(MODELS, OPTIMIZERS)), marks=pytest.mark.slow),
    ],
)
def test_every_step_equals_that_of_torchs_wrapper(
    transport: str, num_ranks: int, names: Sequence[tuple[str, str]], tmp_path: Path
) -> None:
    cases = [Case(model, optimizer, num_steps=40) for model, optimizer in names]
    options = {"kind": "processes", "transport": transport, "timeout": SECONDS}
    by_rank = run_world(train_both, num_ranks, cases, str(tmp_path / "store"), **options)
    for results in zip(*by_rank, strict=True):
        assert all_equal(weights for _, weights in results)
        for differences, _ in results:
            assert len(differences) == 40
            assert max(differences) < 1e-9
