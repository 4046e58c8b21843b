"""What frameworks save where replicas differ: the mean under the plain keys, and each rank's own state beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmura import (
    DDP,
    Algorithm,
    ByteGradAlgorithm,
    CheckpointError,
    DiLoCoAlgorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    MinMaxUInt8,
    Transport,
    run_world,
)
from murmura.integrations.replica_state import mean_state_dict, own_file, restore_own_state, save_own_state

ALGORITHMS = [
    GradientAllReduceAlgorithm(),
    ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8(block_size=4))),
    LowPrecisionDecentralizedAlgorithm(),
    DiLoCoAlgorithm(3),
]


class Run:
    """A model on one rank, its optimizer with moments, and batches that are a function of rank and step."""

    def __init__(self, transport: Transport, algorithm: Algorithm) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        random = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.5, generator=random)
        self.ddp = DDP(model, transport, algorithm=algorithm)
        self.optimizer = torch.optim.Adam(self.ddp.parameters(), lr=0.1)

    def train(self, steps: range) -> list[Tensor]:
        for step in steps:
            random = torch.Generator().manual_seed(100 * self.ddp.transport.rank + step)
            self.optimizer.zero_grad()
            self.ddp(torch.randn(2, 3, generator=random, dtype=torch.float64)).square().mean().backward()
            self.optimizer.step()
        return [parameter.detach().clone() for parameter in self.ddp.parameters()]


def interrupted(transport: Transport, algorithm: Algorithm, folder: Path) -> tuple[list[Tensor], list[Tensor], Any]:
    """The weights of one run of eight steps, those of a run that was saved and resumed after five, and the means."""
    whole = Run(transport, algorithm).train(range(8))
    first = Run(transport, algorithm)
    first.train(range(5))
    save_own_state(folder, first.ddp, [first.optimizer])
    plain = mean_state_dict(first.ddp)
    optimizer = first.optimizer.state_dict() if transport.rank == 0 else None
    torch.save(optimizer, folder / f"optimizer-{transport.rank}.pt")
    own = [parameter.detach().clone() for parameter in first.ddp.parameters()]
    transport.barrier()
    second = Run(transport, algorithm)
    second.ddp.load_state_dict(plain)  # as a framework does: one file for all ranks
    second.optimizer.load_state_dict(torch.load(folder / "optimizer-0.pt"))
    assert restore_own_state(folder, second.ddp, [second.optimizer])
    return whole, second.train(range(5, 8)), (own, list(plain.values()))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: type(each).__name__)
def test_a_run_that_is_resumed_is_the_run_that_never_stopped(algorithm: Algorithm, tmp_path: Path) -> None:
    ranks = run_world(interrupted, 3, algorithm, tmp_path)
    for whole, resumed, _ in ranks:
        assert all(torch.equal(*pair) for pair in zip(whole, resumed, strict=True))
    for index, mean in enumerate(ranks[0][2][1]):
        owns = torch.stack([own[index] for _, _, (own, _) in ranks])
        torch.testing.assert_close(mean, owns.mean(0), rtol=1e-12, atol=1e-12)


def saved(transport: Transport, folder: Path, algorithm: Algorithm) -> None:
    run = Run(transport, algorithm)
    run.train(range(2))
    save_own_state(folder, run.ddp, [run.optimizer])


def restored(transport: Transport, folder: Path, algorithm: Algorithm) -> Any:
    run = Run(transport, algorithm)
    try:
        return restore_own_state(folder, run.ddp, [run.optimizer])
    except CheckpointError as error:
        return str(error)


def test_what_does_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    diloco = DiLoCoAlgorithm(3)
    assert run_world(restored, 2, tmp_path, diloco) == [False, False]  # a checkpoint made without murmura
    run_world(saved, 2, tmp_path, diloco)
    assert run_world(restored, 2, tmp_path, diloco) == [True, True]
    for messages, why in (
        (run_world(restored, 3, tmp_path, diloco), "Go on with 2 ranks, or begin anew from the plain file"),
        (run_world(restored, 2, tmp_path, GradientAllReduceAlgorithm()), "was saved by DiLoCoAlgorithmImpl"),
    ):
        assert all(why in message for message in messages), messages
    own_file(tmp_path, 1).unlink()
    assert all("murmura-rank-1.pt is missing" in message for message in run_world(restored, 2, tmp_path, diloco))


def test_equal_replicas_go_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    run_world(saved, 2, tmp_path, GradientAllReduceAlgorithm())
    assert not torch.load(own_file(tmp_path, 1))["model"]  # it is in the plain file
    assert run_world(restored, 3, tmp_path, GradientAllReduceAlgorithm()) == [True] * 3
