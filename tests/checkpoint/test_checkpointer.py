"""What a checkpoint keeps, who may take it up, and what is refused before anything is lost."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checkpoint.programs import checkpoints_in, train
from ddp.models import backward, errors_on, fill, number, on_ranks, weight, weights_of
from murmura import (
    DDP,
    Algorithm,
    ByteGradAlgorithm,
    Checkpointer,
    CheckpointError,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    MinMaxUInt8,
    QAdamAlgorithm,
    Transport,
    UsageError,
    run_world,
)
from murmura.checkpoint import Restored
from worlds import SECONDS


class Memory:
    """Anything of one's own."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def wrap(transport: Transport, value: float = 1.0, algorithm: Algorithm | None = None) -> DDP:
    return DDP(weight(value), transport, algorithm=algorithm or GradientAllReduceAlgorithm())


def load(transport: Transport, folder: Path, **options: Any) -> tuple[Restored | None, float]:
    ddp = wrap(transport, -1.0)
    restored = Checkpointer(folder).load(ddp=ddp, **options)
    return restored, ddp.module.weight.item()


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    assert on_ranks(lambda transport: load(transport, tmp_path / "new" / "folder"), 2) == [(None, -1.0)] * 2
    assert Checkpointer(tmp_path).latest() is None


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    def save(transport: Transport) -> Path:
        memory = Memory([transport.rank, torch.tensor([float(transport.rank)])])
        return Checkpointer(tmp_path).save(
            7, ddp=wrap(transport, 5.0), extra={"loss": 0.5, "rank": transport.rank}, memory=memory, scaler=None
        )

    def back(transport: Transport) -> tuple[Any, Any]:
        memory = Memory()
        return load(transport, tmp_path, memory=memory), memory.value

    path = tmp_path / "step-000000007"
    assert on_ranks(save, 3) == [path] * 3
    for rank, (found, (own, tensor)) in enumerate(on_ranks(back, 3)):
        assert found == (Restored(7, {"loss": 0.5, "rank": 0}, path), 5.0)
        assert (own, tensor.item()) == (rank, rank)  # what is not the same everywhere comes back to its rank
    assert Checkpointer(tmp_path).latest() == 7


def test_the_newest_are_kept_and_any_of_them_can_be_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def save(transport: Transport) -> None:
        checkpointer = Checkpointer(tmp_path, keep=2)
        for step in range(1, 6):
            checkpointer.save(step, ddp=wrap(transport, step))

    on_ranks(save, 2)
    assert checkpoints_in(tmp_path) == ["step-000000004", "step-000000005"]
    assert on_ranks(load, 2, tmp_path)[1] == (Restored(5, None, tmp_path / "step-000000005"), 5.0)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        found = on_ranks(lambda transport: load(transport, tmp_path, step=4), 2)
    assert found[0] == (Restored(4, None, tmp_path / "step-000000004"), 4.0)
    assert "later checkpoints up to step 5" in caplog.text
    for error in errors_on(lambda transport: load(transport, tmp_path, step=3), 2):
        assert isinstance(error, CheckpointError)
        assert "there are steps [4, 5]" in str(error)


def test_a_step_is_saved_once_and_never_under_a_newer_one(tmp_path: Path) -> None:
    def save(transport: Transport, step: int) -> None:
        ddp, checkpointer = wrap(transport, step), Checkpointer(tmp_path)
        checkpointer.save(step, ddp=ddp)
        nn.init.zeros_(ddp.module.weight)
        checkpointer.save(step, ddp=ddp)  # at the end of training, say

    on_ranks(save, 2, 3)
    assert on_ranks(load, 2, tmp_path)[0][1] == 3.0
    for step in (2, 3):
        for error in errors_on(save, 2, step):
            assert isinstance(error, CheckpointError)
            assert "rank 0: the folder holds a checkpoint of step 3" in str(error)
    assert on_ranks(load, 2, tmp_path)[0][1] == 3.0


def test_random_numbers_go_on(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.rand(), np.random.randn(), torch.rand(()).item()]

    def visit(transport: Transport) -> None:
        np.random.randn()  # numpy keeps the second of a pair
        Checkpointer(tmp_path).save(1, ddp=wrap(transport))
        expected = draw()
        draw()
        load(transport, tmp_path)
        assert draw() == expected

    run_world(visit, 1)


# Another number of ranks


@pytest.mark.parametrize("way", ["gradient_allreduce", "error_feedback", "qadam"])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_where_replicas_are_equal(
    way: str, before: int, after: int, tmp_path: Path
) -> None:
    run_world(lambda transport: train(transport, way, tmp_path, stop_at=4), before, timeout=SECONDS)
    saved = torch.load(tmp_path / "step-000000004" / "model.pt", weights_only=True)
    at_once = run_world(lambda transport: train(transport, way, tmp_path, stop_at=4), after, timeout=SECONDS)
    flat = torch.cat([saved[name].double().reshape(-1) for name in sorted(saved, key=lambda name: is_buffer(name))])
    assert all(torch.equal(weights, flat) and rounds == 4 for weights, _, rounds in at_once)
    further = run_world(lambda transport: train(transport, way, tmp_path), after, timeout=SECONDS)
    assert all(rounds == 10 and steps == list(range(4, 10)) for _, steps, rounds in further)


def is_buffer(name: str) -> bool:
    return "running" in name or "tracked" in name


@pytest.mark.parametrize("way", ["shift_one", "diloco"])
def test_ranks_with_weights_of_their_own_must_be_as_many(way: str, tmp_path: Path) -> None:
    run_world(lambda transport: train(transport, way, tmp_path, stop_at=4), 3, timeout=SECONDS)
    for error in errors_on(lambda transport: train(transport, way, tmp_path, stop_at=5), 2):
        assert isinstance(error, CheckpointError)
        assert "saved by 3 ranks, each with weights of its own, and here are 2" in str(error)
        assert "model.pt" in str(error)


# What does not fit


def test_what_does_not_fit_is_refused_on_every_rank_and_changes_nothing(tmp_path: Path) -> None:
    on_ranks(lambda transport: Checkpointer(tmp_path).save(1, ddp=wrap(transport), memory=Memory(1)), 2)

    def attempt(transport: Transport, algorithm: Algorithm, model: nn.Module, **parts: Any) -> None:
        ddp = DDP(model, transport, algorithm=algorithm)
        before = weights_of(ddp.module)
        try:
            Checkpointer(tmp_path).load(ddp=ddp, **parts)
        finally:
            assert torch.equal(weights_of(ddp.module), before)

    plain = GradientAllReduceAlgorithm()
    for algorithm, parts, words in (
        (plain, {}, r"it holds \['memory'\] beside the model, and load\(\) was given nothing"),
        (plain, {"memory": Memory(), "optimizer": Memory()}, r"was given \['memory', 'optimizer'\]"),
        (LocalSGDAlgorithm(2), {"memory": Memory()}, "saved under GradientAllReduceAlgorithm, and here runs LocalSGD"),
    ):
        for error in errors_on(lambda transport, a=algorithm, p=parts: attempt(transport, a, weight(3.0), **p), 2):
            assert isinstance(error, CheckpointError)
            assert re.search(words, str(error))
    other_model = errors_on(lambda transport: attempt(transport, plain, fill(nn.Linear(2, 2)), memory=Memory()), 2)
    assert all("size mismatch" in str(error) and "start it anew" in str(error) for error in other_model)


def test_ranks_that_save_different_things_are_told_so(tmp_path: Path) -> None:
    def save(transport: Transport) -> None:
        Checkpointer(tmp_path).save(4 + transport.rank, ddp=wrap(transport), memory=Memory())

    for error in errors_on(save, 3):
        assert isinstance(error, UsageError)
        assert "rank 0 saves step 4 with ['memory'], and rank 1 step 5 with ['memory']" in str(error)
    assert checkpoints_in(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extra": {"model": nn.Linear(1, 1)}}, "extra cannot be written as JSON"),
        ({"step": -1}, "a step counts from 0"),
        ({"memory": 3}, "memory=int has no state_dict"),
        ({"memory": Memory(np.float64(1.0))}, r"a numpy\S+ cannot be saved: reading it back would run code"),
        ({"memory": Memory(nn.Linear(1, 1))}, r"a torch.nn\S+ cannot be saved"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(options: Any, words: str, tmp_path: Path) -> None:
    call = {"step": 1, **options}
    for error in errors_on(lambda transport: Checkpointer(tmp_path).save(ddp=wrap(transport), **call), 2):
        assert isinstance(error, CheckpointError)
        assert re.search(words, str(error))
    assert checkpoints_in(tmp_path) == []


# Everything else that a model and an algorithm may have


class Local(nn.Module):
    """A parameter that is kept together, one that is not, and two names for one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = weight(1.0)
        self.own = weight(1.0)
        self.tied = self.shared

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.tied(x))


def test_ignored_parameters_come_back_to_their_rank(tmp_path: Path) -> None:
    def visit(transport: Transport) -> tuple[float, float, int]:
        ddp = DDP(Local(), transport, ignore=["own.weight"])
        nn.init.constant_(ddp.module.own.weight, float(transport.rank))
        path = Checkpointer(tmp_path).save(1, ddp=ddp)
        own = torch.load(path / f"rank-{transport.rank}.pt", weights_only=True)["model"]
        fresh = DDP(Local(), transport, ignore=["own.weight"])
        Checkpointer(tmp_path).load(ddp=fresh)
        return fresh.module.own.weight.item(), fresh.module.tied.weight.item(), len(own)

    assert on_ranks(visit, 3) == [(0.0, 1.0, 0), (1.0, 1.0, 1), (2.0, 1.0, 1)]


def test_two_checkpointers_and_two_models_side_by_side(tmp_path: Path) -> None:
    def visit(transport: Transport) -> list[float]:
        ones, twos = wrap(transport, 1.0), wrap(transport, 2.0)
        first, second = Checkpointer(tmp_path / "a"), Checkpointer(tmp_path / "b")
        for step in (1, 2):
            first.save(step, ddp=ones)
            second.save(step, ddp=twos)
        first.load(ddp=twos)
        return [ones.module.weight.item(), twos.module.weight.item()]

    assert on_ranks(visit, 2) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize(
    "algorithm", [ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8())), QAdamAlgorithm()], ids=["bytes", "qadam"]
)
def test_a_run_can_be_saved_before_its_first_round(algorithm: Algorithm, tmp_path: Path) -> None:
    def visit(transport: Transport) -> int:
        Checkpointer(tmp_path).save(0, ddp=wrap(transport, algorithm=algorithm))
        ddp = wrap(transport, 2.0, algorithm=algorithm)
        Checkpointer(tmp_path).load(ddp=ddp)
        backward(ddp, 1.0)
        assert ddp.module(number(1)).item() == 1.0
        return ddp.algorithm_state_dict()["round"]

    assert on_ranks(visit, 2) == [1, 1]
