"""What belongs to a parameter goes with its name: through resuming, switching, thawing and loading."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp.models import all_equal, fill, on_ranks, values, weights_of
from murmura import (
    DDP,
    Algorithm,
    ByteGradAlgorithm,
    Cast,
    Checkpointer,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    MinMaxUInt8,
    Phased,
    PushSumAlgorithm,
    StreamingDiLoCoAlgorithm,
    Transport,
)


def train(ddp: DDP, optimizer: torch.optim.Optimizer, rounds: range) -> None:
    for index in rounds:
        optimizer.zero_grad()
        ddp(values(4, 4, seed=100 * index + ddp.transport.rank)).square().mean().backward()
        optimizer.step()


def mlp() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))


OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@pytest.mark.parametrize("by", ["Checkpointer", "state dicts"])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize(
    "algorithm",
    [
        LocalSGDAlgorithm(4),
        DiLoCoAlgorithm(4),
        StreamingDiLoCoAlgorithm(4, fragments=2, overlap=2),
        DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    ],
)
def test_another_algorithm_right_after_a_resume_starts_from_equal_moments(
    algorithm: Algorithm, optimizer_name: str, by: str, tmp_path: Path
) -> None:
    def run(transport: Transport) -> Tensor:
        saved: dict[str, Any] = {}
        for resumes in (False, True):
            with closing(DDP(mlp(), transport, algorithm=algorithm)) as ddp:
                optimizer = OPTIMIZERS[optimizer_name](ddp.module.parameters())
                checkpointer = Checkpointer(tmp_path)
                if not resumes:
                    train(ddp, optimizer, range(6))
                    if by == "Checkpointer":
                        checkpointer.save(6, ddp=ddp, optimizer=optimizer)
                    saved = {
                        "model": {name: each.clone() for name, each in ddp.state_dict().items()},
                        "algorithm": ddp.algorithm_state_dict(),
                        "optimizer": optimizer.state_dict(),
                    }
                    continue
                if by == "Checkpointer":
                    checkpointer.load(ddp=ddp, optimizer=optimizer)
                else:
                    ddp.load_state_dict(saved["model"])
                    ddp.load_algorithm_state_dict(saved["algorithm"])
                    optimizer.load_state_dict(saved["optimizer"])
                ddp.set_algorithm("gradient_allreduce")
                train(ddp, optimizer, range(6, 10))
                ddp.verify_in_sync()
        return weights_of(ddp.module)

    assert all_equal([[each] for each in on_ranks(run, 2)])


LOSSY = ["gradient_allreduce:compressor=topk(ratio=0.25)", "powersgd:min_compression_rate=1"]


@pytest.mark.parametrize("algorithm", LOSSY)
def test_a_step_that_was_skipped_before_the_resume_is_noticed_by_a_part(algorithm: str) -> None:
    """As by the whole model: what the messages of its round lost counts as it did before."""

    def run(transport: Transport, by_parts: bool) -> list[Tensor]:
        state: dict[str, Any] = {}
        for resumes in (False, True):
            with closing(DDP(mlp(), transport, algorithm=algorithm)) as ddp:
                x = values(4, 4, seed=100 * resumes + transport.rank)
                if resumes:
                    ddp.load_algorithm_state_dict(state)
                first, activation, second = ddp.module
                (second(activation(first(x))) if resumes and by_parts else ddp(x)).square().mean().backward()
                state = ddp.algorithm_state_dict()
        return [each.grad for each in ddp.module.parameters()]

    assert all_equal([*on_ranks(run, 2, False), *on_ranks(run, 2, True)])


@pytest.mark.parametrize("algorithm", LOSSY)
def test_a_step_after_the_state_was_loaded_is_a_step(algorithm: str) -> None:
    """When the next one is skipped, only what its own messages lost is taken back."""

    def run(transport: Transport, loads: bool) -> Tensor:
        with closing(DDP(mlp(), transport, algorithm=algorithm)) as ddp:
            optimizer = OPTIMIZERS["momentum"](ddp.module.parameters())
            for index in range(3):
                optimizer.zero_grad()
                ddp(values(4, 4, seed=100 * index + transport.rank)).square().mean().backward()
                if loads and index == 0:
                    ddp.load_algorithm_state_dict(ddp.algorithm_state_dict())
                if index != 1:
                    optimizer.step()
            return weights_of(ddp.module)

    for plain, loaded in zip(on_ranks(run, 2, False), on_ranks(run, 2, True), strict=True):
        assert torch.equal(plain, loaded)


def test_phased_resumes_on_its_boundary(tmp_path: Path) -> None:
    algorithm = Phased(LocalSGDAlgorithm(4), 6, then=GradientAllReduceAlgorithm())

    def run(transport: Transport) -> None:
        for resumes in (False, True):
            with closing(DDP(mlp(), transport, algorithm=algorithm)) as ddp:
                optimizer = OPTIMIZERS["momentum"](ddp.module.parameters())
                checkpointer = Checkpointer(tmp_path)
                if resumes:
                    checkpointer.load(ddp=ddp, optimizer=optimizer)
                train(ddp, optimizer, range(6, 10) if resumes else range(6))
                if resumes:
                    ddp.verify_in_sync()
                else:
                    checkpointer.save(6, ddp=ddp, optimizer=optimizer)

    on_ranks(run, 2)


def wrapped_in_phases(transport: Transport, first: str) -> tuple[DDP, torch.optim.Optimizer]:
    model = mlp()
    model[0].weight.requires_grad_(False)
    ddp = DDP(model, transport, algorithm=Phased(first, 2, then="gradient_allreduce:compressor=topk(ratio=0.25)"))
    return ddp, torch.optim.SGD(model.parameters(), lr=0.1)


def resumed_in_phases(ddp: DDP, first: str) -> tuple[DDP, torch.optim.Optimizer]:
    algorithm_state, weights = copy.deepcopy((ddp.algorithm_state_dict(), ddp.state_dict()))
    ddp.close()
    ddp, optimizer = wrapped_in_phases(ddp.transport, first)
    ddp.load_state_dict(weights)
    ddp.load_algorithm_state_dict(algorithm_state)
    return ddp, optimizer


FIRST_PHASES = ["gradient_allreduce", "local_sgd:interval=2"]


@pytest.mark.parametrize("first", FIRST_PHASES)
@pytest.mark.parametrize("by_parts", [False, True])
def test_a_parameter_thawed_right_after_a_resume_in_another_phase(by_parts: bool, first: str) -> None:
    """What the second phase has lost of each parameter moves with it; by parts, the round begins after its backward."""

    def run(transport: Transport, resumes: bool) -> Tensor:
        ddp, optimizer = wrapped_in_phases(transport, first)
        train(ddp, optimizer, range(4))
        if resumes:
            ddp, optimizer = resumed_in_phases(ddp, first)
        with closing(ddp):
            ddp.module[0].weight.requires_grad_(True)
            optimizer.zero_grad()
            x = values(4, 4, seed=transport.rank)
            with ddp.no_sync():
                (ddp.module[2](torch.tanh(ddp.module[0](x))) if by_parts else ddp(x)).square().mean().backward()
            ddp.sync_gradients()
            optimizer.step()
            train(ddp, optimizer, range(5, 8))
            return weights_of(ddp.module)

    for plain, resumed in zip(on_ranks(run, 2, False), on_ranks(run, 2, True), strict=True):
        assert torch.equal(plain, resumed)


@pytest.mark.parametrize("first", FIRST_PHASES)
def test_a_step_skipped_right_before_a_resume_in_another_phase(first: str) -> None:
    """What its messages lost is taken back, as without a resume."""

    def run(transport: Transport, resumes: bool) -> Tensor:
        ddp, optimizer = wrapped_in_phases(transport, first)
        train(ddp, optimizer, range(4))
        ddp(values(4, 4, seed=transport.rank)).square().mean().backward()
        optimizer.zero_grad()
        if resumes:
            ddp, optimizer = resumed_in_phases(ddp, first)
        with closing(ddp):
            train(ddp, optimizer, range(5, 8))
            return weights_of(ddp.module)

    for plain, resumed in zip(on_ranks(run, 2, False), on_ranks(run, 2, True), strict=True):
        assert torch.equal(plain, resumed)


@pytest.mark.parametrize("how", ["ddp", "module", "broadcast"])
@pytest.mark.parametrize("algorithm", [DiLoCoAlgorithm(1), LowPrecisionDecentralizedAlgorithm()])
def test_loaded_weights_are_no_step(algorithm: Algorithm, how: str) -> None:
    """With a learning rate of zero they stay what was loaded."""

    def run(transport: Transport) -> Tensor:
        with closing(DDP(mlp(), transport, algorithm=algorithm)) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.0)
            train(ddp, optimizer, range(2))
            ones = {name: torch.ones_like(each) for name, each in ddp.state_dict().items()}
            if how == "ddp":
                ddp.load_state_dict(ones)
            elif how == "module":
                ddp.module.load_state_dict(ones)
            else:
                for parameter in ddp.module.parameters():
                    parameter.data.fill_(1.0 + transport.rank)
                ddp.broadcast_parameters(0)
            train(ddp, optimizer, range(2, 5))
            return weights_of(ddp.module)

    for weights in on_ranks(run, 2):
        torch.testing.assert_close(weights, torch.ones_like(weights), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bucket_size_bytes", [32, 2**20])
@pytest.mark.parametrize("saved_after", [1, 2])
def test_error_feedback_resumes_bit_for_bit(saved_after: int, bucket_size_bytes: int, tmp_path: Path) -> None:
    algorithm = ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8()))

    def run(transport: Transport, resumes: bool) -> Tensor:
        with closing(DDP(mlp(), transport, algorithm=algorithm, bucket_size_bytes=bucket_size_bytes)) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            checkpointer = Checkpointer(tmp_path)
            if resumes:
                checkpointer.load(ddp=ddp, optimizer=optimizer)
            else:
                train(ddp, optimizer, range(saved_after))
                checkpointer.save(saved_after, ddp=ddp, optimizer=optimizer)
            train(ddp, optimizer, range(saved_after, 6))
            return weights_of(ddp.module)

    for whole, resumed in zip(on_ranks(run, 2, False), on_ranks(run, 2, True), strict=True):
        assert torch.equal(whole, resumed)


class TwoHeads(nn.Module):
    """A body, and a head that is frozen at first and adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = fill(nn.Linear(4, 3))
        self.head = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + 0 * self.head


@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCoAlgorithm(2),
        DiLoCoAlgorithm(2, compressor=ErrorFeedback(MinMaxUInt8(block_size=1))),
        StreamingDiLoCoAlgorithm(2, fragments=1, overlap=1, compressor=ErrorFeedback(Cast(torch.bfloat16))),
        LowPrecisionDecentralizedAlgorithm(compressor=MinMaxUInt8(block_size=1)),
        ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8(block_size=1))),
        ByteGradAlgorithm(compressor=ErrorFeedback(Cast(torch.bfloat16))),  # which leaves something over
    ],
)
def test_thawing_leaves_the_state_of_other_parameters(algorithm: Algorithm) -> None:
    """A thawed head that gets no gradient changes nothing for the body: blocks of one element do not mix them."""

    def run(transport: Transport, thaws: bool) -> Tensor:
        with closing(DDP(TwoHeads(), transport, algorithm=algorithm)) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            train(ddp, optimizer, range(3))
            ddp.module.head.requires_grad_(thaws)
            train(ddp, optimizer, range(3, 8))
            return weights_of(ddp.module.body)

    for frozen, thawed in zip(on_ranks(run, 3, False), on_ranks(run, 3, True), strict=True):
        torch.testing.assert_close(frozen, thawed, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCoAlgorithm(2),
        DiLoCoAlgorithm(2, compressor=ErrorFeedback(MinMaxUInt8(block_size=1))),
        StreamingDiLoCoAlgorithm(2, fragments=1, overlap=1, alpha=0.0, compressor=None),
        LowPrecisionDecentralizedAlgorithm(communication_interval=2, compressor=MinMaxUInt8(block_size=1)),
        PushSumAlgorithm(),
    ],
)
@pytest.mark.parametrize(("loaded_after", "thawed_after"), [(2, 2), (2, 3), (3, 4)])
def test_thawing_after_weights_were_loaded(algorithm: Algorithm, loaded_after: int, thawed_after: int) -> None:
    """The ranks load different weights and go on from their mean, as they do without a thawed head."""

    def run(transport: Transport, thaws: bool) -> Tensor:
        with closing(DDP(TwoHeads(), transport, algorithm=algorithm)) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            train(ddp, optimizer, range(loaded_after))
            ddp.load_state_dict({name: each + transport.rank for name, each in ddp.state_dict().items()})
            train(ddp, optimizer, range(loaded_after, thawed_after))
            ddp.module.head.requires_grad_(thaws)
            train(ddp, optimizer, range(thawed_after, 8))
            return weights_of(ddp.module.body)

    for frozen, thawed in zip(on_ranks(run, 3, False), on_ranks(run, 3, True), strict=True):
        torch.testing.assert_close(frozen, thawed, rtol=0, atol=1e-6)
