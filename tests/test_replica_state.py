"""What frameworks save where replicas differ: the mean under the plain keys, and each rank's own state beside it."""

from __future__ import annotations

import errno
from collections.abc import Callable
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
from murmura.algorithms import algorithm_named
from murmura.integrations import replica_state
from murmura.integrations.replica_state import (
    mark_file,
    mean_state_dict,
    own_file,
    replicas_never_differ,
    restore_own_state,
    saving_own_state,
)

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
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4, 6])

    def train(self, steps: range) -> list[Tensor]:
        for step in steps:
            random = torch.Generator().manual_seed(100 * self.ddp.transport.rank + step)
            self.optimizer.zero_grad()
            self.ddp(torch.randn(2, 3, generator=random, dtype=torch.float64)).square().mean().backward()
            self.optimizer.step()
            if step % 2 == 0 or self.ddp.transport.rank or replicas_never_differ(self.ddp):
                self.scheduler.step()  # rank 0 leaves some out, as after steps that a GradScaler skips
        return [parameter.detach().clone() for parameter in self.ddp.parameters()]


def interrupted(transport: Transport, algorithm: Algorithm, folder: Path) -> tuple[list[Tensor], list[Tensor], Any]:
    """The weights of one run of eight steps, those of a run that was saved and resumed after five, and the means."""
    whole = Run(transport, algorithm).train(range(8))
    first = Run(transport, algorithm)
    first.train(range(5))
    with saving_own_state(folder, first.ddp, [first.optimizer], [first.scheduler]):
        plain = mean_state_dict(first.ddp)
        if transport.rank == 0:
            torch.save([first.optimizer.state_dict(), first.scheduler.state_dict()], folder / "optimizer.pt")
    own = [parameter.detach().clone() for parameter in first.ddp.parameters()]
    second = Run(transport, algorithm)
    second.ddp.load_state_dict(plain)  # as a framework does: one file for all ranks
    for part, state in zip((second.optimizer, second.scheduler), torch.load(folder / "optimizer.pt"), strict=True):
        part.load_state_dict(state)
    assert restore_own_state(folder, second.ddp, [second.optimizer], [second.scheduler])
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
    with saving_own_state(folder, run.ddp, [run.optimizer]):
        pass


def cut_short(transport: Transport, folder: Path, algorithm: Algorithm, own: tuple[int, ...]) -> None:
    """A save into the folder of another, ended when the ranks in `own` had written their files."""
    before = {rank: own_file(folder, rank).read_bytes() for rank in range(transport.world_size)}
    run = Run(transport, algorithm)
    run.train(range(2))
    saving = saving_own_state(folder, run.ddp, [run.optimizer])
    saving.__enter__()  # the plain files would be written now
    if transport.rank not in own:
        own_file(folder, transport.rank).write_bytes(before[transport.rank])
    transport.barrier()


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


def save_on_a_full_disk(transport: Transport, folder: Path, algorithm: Algorithm) -> str:
    run = Run(transport, algorithm)
    run.train(range(2))
    with pytest.raises(CheckpointError) as refusal, saving_own_state(folder, run.ddp, [run.optimizer]):
        pass
    return str(refusal.value)


def test_a_full_disk_leaves_the_older_checkpoint_whole_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diloco = DiLoCoAlgorithm(3)
    run_world(saved, 2, tmp_path, diloco)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    write_tensors = replica_state.write_tensors

    def write(path: Path, state: Any) -> None:
        write_tensors(path, state)
        if "rank-1" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(replica_state, "write_tensors", write)
    for message in run_world(save_on_a_full_disk, 2, tmp_path, diloco):
        assert "failed on rank 1: No space left on device" in message
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    assert run_world(restored, 2, tmp_path, diloco) == [True, True]


def refused(transport: Transport, folder: Path, algorithm: Algorithm) -> tuple[str, bool, int]:
    """Why the state is refused, whether the weights are what they were, and how much the optimizer remembers."""
    run = Run(transport, algorithm)
    before = [parameter.detach().clone() for parameter in run.ddp.parameters()]
    with pytest.raises(CheckpointError) as refusal:
        restore_own_state(folder, run.ddp, [run.optimizer])
    is_same = all(torch.equal(*pair) for pair in zip(before, run.ddp.parameters(), strict=True))
    return str(refusal.value), is_same, len(run.optimizer.state)


@pytest.mark.parametrize(
    ("then", "now", "why"),
    [
        ("diloco:interval=2:compressor=topk", "diloco:interval=2", "compressor=None cannot load"),
        ("powersgd:min_compression_rate=1", "powersgd:error_feedback=false", "error_feedback=False would drop"),
    ],
)
def test_a_state_that_the_algorithm_refuses_changes_nothing(then: str, now: str, why: str, tmp_path: Path) -> None:
    run_world(saved, 2, tmp_path, algorithm_named(then))
    for text, is_same, num_moments in run_world(refused, 2, tmp_path, algorithm_named(now)):
        assert why in text
        assert is_same
        assert num_moments == 0


class Code:
    """Would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("read"),)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut at the end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no state at all"),
    "list": lambda path: torch.save([1, 2], path),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "push_sum"])  # of a small file and of a larger one
def test_a_damaged_file_is_named_as_such_on_all_ranks(algorithm: str, damage: Any, tmp_path: Path) -> None:
    run_world(saved, 2, tmp_path, algorithm_named(algorithm))
    damage(own_file(tmp_path, 1))
    for text in run_world(restored, 2, tmp_path, algorithm_named(algorithm)):
        assert "failed on rank 1" in text
        assert "murmura-rank-1.pt is damaged: it was cut short" in text


def test_code_in_a_file_is_not_run_and_torchs_advice_to_run_it_is_not_repeated(tmp_path: Path) -> None:
    run_world(saved, 2, tmp_path, GradientAllReduceAlgorithm())
    torch.save(Code(), own_file(tmp_path, 1))
    for text in run_world(restored, 2, tmp_path, GradientAllReduceAlgorithm()):
        assert "a checkpoint runs no code" in text
        assert "weights_only" not in text


@pytest.mark.parametrize("content", ["{", "[]", "{}", ""])
def test_a_damaged_mark_is_named_as_such_on_all_ranks(content: str, tmp_path: Path) -> None:
    run_world(saved, 2, tmp_path, GradientAllReduceAlgorithm())
    mark_file(tmp_path).write_text(content)
    for text in run_world(restored, 2, tmp_path, GradientAllReduceAlgorithm()):
        assert "murmura-complete.json is damaged" in text


@pytest.mark.parametrize("own", [(0,), (0, 1)], ids=["while own files are written", "while plain files are written"])
def test_a_save_over_another_that_was_cut_short_is_refused(own: tuple[int, ...], tmp_path: Path) -> None:
    algorithm = DiLoCoAlgorithm(3)
    run_world(saved, 2, tmp_path, algorithm)
    run_world(cut_short, 2, tmp_path, algorithm, own)
    for message in run_world(restored, 2, tmp_path, algorithm):
        assert "are not of one save" in message
        assert "a folder of its own" in message
    run_world(saved, 2, tmp_path, algorithm)
    assert run_world(restored, 2, tmp_path, algorithm) == [True, True]


def test_files_of_ranks_that_are_no_more_are_removed(tmp_path: Path) -> None:
    run_world(saved, 3, tmp_path, GradientAllReduceAlgorithm())
    run_world(saved, 2, tmp_path, GradientAllReduceAlgorithm())
    assert sorted(tmp_path.iterdir()) == [mark_file(tmp_path), own_file(tmp_path, 0), own_file(tmp_path, 1)]
    assert run_world(restored, 3, tmp_path, GradientAllReduceAlgorithm()) == [True] * 3


def test_equal_replicas_go_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    run_world(saved, 2, tmp_path, GradientAllReduceAlgorithm())
    assert not torch.load(own_file(tmp_path, 1))["model"]  # it is in the plain file
    assert run_world(restored, 3, tmp_path, GradientAllReduceAlgorithm()) == [True] * 3
