"""MurmuraTrainer: the numbers of the plain loop and of Transformers' own Trainer, checkpoints, resuming, decisions."""

from __future__ import annotations

from pathlib import Path

import pytest

from integrations import transformers_programs as programs
from integrations.loops import ALGORITHMS, far, mean
from integrations.ranks import run
from murmura import MurmuraError

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_weights_are_those_of_the_plain_loop(name: str, world_size: int, bf16: bool, tmp_path: Path) -> None:
    """Also those of Transformers' own Trainer, where gradients are averaged."""
    ranks = run(programs.beside_the_plain_loop, world_size, ALGORITHMS[name], tmp_path, bf16)
    for kind in ("gpt2", "bert"):
        by_rank = [rank[kind] for rank in ranks]
        for own, after, plain, transformers in by_rank:
            assert far(own, plain) <= 1e-6, kind
            assert far(after, by_rank[0][1]) == 0.0, kind
            assert (far(after, transformers) <= 1e-6) == (name == "gradient_allreduce"), kind
            is_first = own is by_rank[0][0]
            assert (far(own, by_rank[0][0]) == 0.0) == (is_first or name == "gradient_allreduce"), kind
        assert far(by_rank[0][1], mean([own for own, *_ in by_rank])) <= 1e-6, kind


def test_other_arguments_work_or_are_refused(tmp_path: Path) -> None:
    for apart, sharded in run(programs.choices, 2, ALGORITHMS["gradient_allreduce"], tmp_path):
        assert apart.pop("fp16") <= 1e-6  # from Transformers' own Trainer
        assert apart.keys() == {"gradient_checkpointing", "torch_compile"}
        assert max(apart.values()) <= 1e-6, apart  # from the plain loop
        assert "whole replicas" in sharded


def test_one_process_is_refused_what_several_are(tmp_path: Path) -> None:
    number, deepspeed = run(programs.refused_alone, 1, tmp_path)[0]
    assert number.startswith("algorithm=-1 is no Algorithm")
    assert deepspeed.startswith("fsdp and deepspeed in TrainingArguments shard the model")


def test_all_ranks_lower_the_learning_rate_alike(tmp_path: Path) -> None:
    first, second = run(programs.plateau, 2, ALGORITHMS["low_precision_decentralized"], tmp_path)
    assert first == second
    assert first[-1] < first[0]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_killed_and_resumed_is_as_never_stopped(name: str, world_size: int, tmp_path: Path) -> None:
    algorithm, folder = ALGORITHMS[name], tmp_path / "killed"
    whole = run(programs.uninterrupted, world_size, algorithm, tmp_path / "whole")
    with pytest.raises(MurmuraError):
        run(programs.killed, world_size, algorithm, folder)
    ranks = run(programs.resumed, world_size, algorithm, folder)
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
