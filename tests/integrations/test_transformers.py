"""MurmuraTrainer: the numbers of the plain loop and of Transformers' own Trainer, checkpoints, resuming, decisions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from integrations import transformers_programs as programs
from integrations.loops import ALGORITHMS, far, mean
from integrations.ranks import run
from murmura import MurmuraError

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("world_size", "kind", "accumulate", "bf16"),
    [(2, "gpt2", 4, False), (2, "bert", 1, True), (4, "gpt2", 2, False)],
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_weights_are_those_of_the_plain_loop(
    name: str, world_size: int, kind: str, accumulate: int, bf16: bool, tmp_path: Path
) -> None:
    ranks = run(programs.beside_the_plain_loop, world_size, ALGORITHMS[name], kind, tmp_path, accumulate, bf16)
    for found, plain, own in ranks:
        assert far(found, plain) <= 1e-6
        assert all(torch.equal(*pair) for pair in zip(found, ranks[0][0], strict=True))  # all hold the mean
        if name == "gradient_allreduce":
            assert far(found, own) <= 1e-6
        else:
            assert far(found, own) > 1e-6  # another algorithm ran


@pytest.mark.parametrize("name", ALGORITHMS)
def test_killed_and_resumed_is_as_never_stopped(name: str, tmp_path: Path) -> None:
    algorithm, folder = ALGORITHMS[name], tmp_path / "killed"
    whole = run(programs.uninterrupted, 2, algorithm, tmp_path / "whole")
    with pytest.raises(MurmuraError):
        run(programs.killed, 2, algorithm, folder)
    ranks = run(programs.resumed, 2, algorithm, folder)
    for (found, plain, _), expected in zip(ranks, whole, strict=True):
        assert far(found, expected) == 0.0
        if name != "gradient_allreduce":
            assert far(plain, mean([own for _, _, own in ranks])) < 1e-7  # plain keys hold the mean


@pytest.mark.parametrize("stops", [True, False])
def test_all_ranks_decide_alike_and_keep_the_best(stops: bool, tmp_path: Path) -> None:
    name = "low_precision_decentralized" if stops else "diloco"
    ranks = run(programs.best, 2, ALGORITHMS[name], tmp_path, stops)
    assert len({(steps, checkpoint) for steps, checkpoint, *_ in ranks}) == 1
    for _, _, noted, again, found, loaded in ranks:
        assert again == pytest.approx(noted, abs=1e-6)  # the best one is loaded, and the mean was evaluated
        assert far(found, loaded) == 0.0
        assert far(found, ranks[0][4]) == 0.0


def test_train_can_be_called_again(tmp_path: Path) -> None:
    (first, weights), (second, others) = run(programs.twice, 2, ALGORITHMS["diloco"], tmp_path)
    assert first == second
    assert far(weights, others) == 0.0


def test_other_trainers_can_be_mixed_in_and_wrapped_models_cannot(tmp_path: Path) -> None:
    for module, refusal in run(programs.subclassed, 2, ALGORITHMS["diloco"], tmp_path):
        assert module == "murmura.integrations.accelerate"
        assert "Give it the bare model" in refusal
