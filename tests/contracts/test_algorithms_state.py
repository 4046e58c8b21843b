"""Everything an algorithm carries is in its state: a resumed run continues bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contracts.catalogue import Entry, every
from contracts.training import regression, step
from ddp.models import fill, on_ranks
from murmura import (
    DDP,
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    ConfigError,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    ErrorFeedback,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    MinMaxUInt8,
    ReplicaDivergence,
    Transport,
    run_world,
)
from oracles.algorithms.simulation import Task, flat_of
from worlds import SECONDS

STEPS = 6
TRAINED = {0: "11001100", 2: "00110011"}  # layers by index, and in which rounds they are


def save(ddp: DDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a user would write to a file."""
    algorithm = ddp.algorithm_state_dict()  # first: it settles what a skipped step has left pending
    return copy.deepcopy({"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "algorithm": algorithm})


def run(
    transport: Transport,
    algorithm: Algorithm,
    task: Task,
    rounds: Sequence[int],
    saved: Sequence[dict[str, Any]] | None = None,
    trained: Mapping[int, str] | None = None,
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """This rank's flat and state after each of `rounds`, from the beginning or from what the ranks have saved.

    Layers in `trained` are frozen and thawed before the rounds that it says; what comes before the first of `rounds`
    is done before the model is wrapped.
    """
    model = task.make_model()
    freeze(model, trained or {}, rounds[0])
    ddp = DDP(model, transport, algorithm=algorithm)
    optimizer = task.make_optimizer(ddp.parameters())
    if saved is not None:
        own = copy.deepcopy(saved[transport.rank])
        ddp.load_state_dict(own["model"])
        optimizer.load_state_dict(own["optimizer"])
        ddp.load_algorithm_state_dict(own["algorithm"])
    flats, states = [], []
    for number in rounds:
        freeze(model, trained or {}, number)
        step(ddp, optimizer, task, number, transport.rank)
        flats.append(flat_of(ddp.module))
        states.append(save(ddp, optimizer))
    ddp.close()
    return flats, states


def freeze(model: nn.Module, trained: Mapping[int, str], number: int) -> None:
    """Let parameters want gradients as in round `number`."""
    for index, rounds in trained.items():
        model.get_submodule(str(index)).requires_grad_(rounds[number] == "1")


def check_resumption(
    size: int,
    algorithm: Algorithm,
    task: Task,
    hosts: Sequence[int] | None = None,
    *,
    steps: int = STEPS,
    cuts: Sequence[int] = (1, 2, 3, 4),
    trained: Mapping[int, str] | None = None,
) -> None:
    """Cut the run after a step, before and at and behind the ends of intervals, and go on in a new world."""
    whole = run_world(run, size, algorithm, task, range(steps), None, trained, hosts=hosts, timeout=SECONDS)
    for cut in cuts:
        saved = [states[cut - 1] for _, states in whole]
        resumed = run_world(run, size, algorithm, task, range(cut, steps), saved, trained, hosts=hosts, timeout=SECONDS)
        for rank in range(size):
            for number, flat in enumerate(resumed[rank][0], start=cut):
                assert torch.equal(flat, whole[rank][0][number]), f"rank {rank}, cut after {cut}, step {number}"


@every(in_pairs=True)
def test_a_resumed_run_continues_bit_for_bit(entry: Entry) -> None:
    check_resumption(3, entry.make(), entry.fit(regression("momentum", torch.float32)))


@every()
def test_what_a_run_has_frozen_or_thawed_may_be_so_before_it_is_wrapped_again(entry: Entry) -> None:
    task = entry.fit(regression("momentum", torch.float32))
    check_resumption(3, entry.make(), task, steps=8, cuts=(2, 3, 6), trained=TRAINED)


class Backwards(nn.Module):
    """Layers defined in the order of their use have gradients in the opposite order; these do not."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)
        self.first = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def backwards() -> nn.Module:
    return fill(Backwards())


@every(lambda entry: entry.lockstep)
def test_a_run_that_has_not_yet_taken_over_the_order_of_its_gradients(entry: Entry) -> None:
    check_resumption(3, entry.make(), entry.fit(replace(regression("sgd", torch.float32), make_model=backwards)))


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda: DecentralizedAlgorithm(True, "shift_one", 3),
        lambda: LowPrecisionDecentralizedAlgorithm(True, 3),
        lambda: LocalSGDAlgorithm(3),
        lambda: DiLoCoAlgorithm(3, compressor=ErrorFeedback(MinMaxUInt8())),
        lambda: AsyncModelAverageAlgorithm(sync_interval_rounds=3),
        lambda: ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8())),
    ],
    ids=["shift_one", "low_precision", "local_sgd", "diloco", "async", "error_feedback"],
)
def test_across_intervals_and_hosts(algorithm: Any) -> None:
    check_resumption(4, algorithm(), regression("adam", torch.float32), [0, 0, 1, 1])


def test_a_state_can_be_written_to_a_file(tmp_path: Any) -> None:
    def visit(transport: Transport) -> bool:
        _, states = run(transport, LowPrecisionDecentralizedAlgorithm(), regression(), range(2))
        path = tmp_path / f"rank{transport.rank}.pt"
        torch.save(states[-1], path)
        loaded = torch.load(path, weights_only=True)
        flats, _ = run(transport, LowPrecisionDecentralizedAlgorithm(), regression(), [2], [loaded] * 2)
        wanted, _ = run(transport, LowPrecisionDecentralizedAlgorithm(), regression(), range(3))
        return torch.equal(flats[0], wanted[2])

    assert on_ranks(visit, 2) == [True, True]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (4, 3)])
def test_a_ring_of_another_size_is_refused_with_the_reason(before: int, after: int) -> None:
    algorithm, task = LowPrecisionDecentralizedAlgorithm(), regression()
    saved = [states[-1] for _, states in run_world(run, before, algorithm, task, range(2), timeout=SECONDS)]
    with pytest.raises(ConfigError, match=rf"(?s){before}.*{after}|{after}.*{before}"):
        run_world(run, after, algorithm, task, [2], [*saved, *saved], timeout=SECONDS)


def edits(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any, bool]]:
    """Each field below `path` in `tree`, and the tree without it and with a string in its place."""
    at = tree
    for key in path:
        at = at[key]
    for key in at if isinstance(at, dict) else range(len(at)):
        if isinstance(key, str):
            for is_dropped in (True, False):
                edited = copy.deepcopy(tree)
                place = edited
                for step in path:
                    place = place[step]
                if is_dropped:
                    del place[key]
                else:
                    place[key] = "edited"
                yield key, edited, is_dropped
        if isinstance(at[key], dict | list):
            yield from edits(tree, (*path, key))


# What older versions have not saved, and compressors that take anything.
MAY_BE_MISSING, MAY_BE_ANYTHING = ("trained", "moments", "kept", "arrival"), ("inner",)


@every()
def test_an_edited_state_is_refused_by_the_name_of_the_field_before_anything_changes(entry: Entry) -> None:
    task = entry.fit(regression())

    def visit(transport: Transport) -> list[str]:
        _, states = run(transport, entry.make(), task, range(3))
        state = states[-1]["algorithm"]
        ddp = DDP(task.make_model(), transport, algorithm=entry.make())
        fresh = repr(ddp.algorithm_state_dict())
        wrong = []
        for key, edited, is_dropped in edits(state):
            if (is_dropped and (key in MAY_BE_MISSING or key in ddp.module.state_dict())) or key in MAY_BE_ANYTHING:
                continue
            try:
                ddp.load_algorithm_state_dict(edited)
            except ConfigError as error:
                if key not in str(error) and key != "name" and "another compressor has saved" not in str(error):
                    wrong.append(f"{key}: {error}")
            except Exception as error:
                wrong.append(f"{key}: {error!r}")
            else:
                wrong.append(f"{key} {is_dropped} was accepted")
        if repr(ddp.algorithm_state_dict()) != fresh:
            wrong.append("something was changed")
        ddp.close()
        return wrong

    assert on_ranks(visit, 2) == [[], []]


@every()
def test_states_of_different_steps_are_refused_on_every_rank(entry: Entry) -> None:
    task = entry.fit(regression())

    def visit(transport: Transport) -> str:
        _, states = run(transport, entry.make(), task, range(3))
        ddp = DDP(task.make_model(), transport, algorithm=entry.make())
        with pytest.raises(ReplicaDivergence) as caught:
            ddp.load_algorithm_state_dict(states[2 - transport.rank]["algorithm"])
        assert ddp.algorithm_state_dict()["round"] == 0
        ddp.close()
        return str(caught.value)

    told = on_ranks(visit, 2)
    assert all("rank 0: round 3\n  rank 1: round 2\n" in each for each in told)


@pytest.mark.parametrize(
    "algorithm", [LocalSGDAlgorithm(1), LowPrecisionDecentralizedAlgorithm()], ids=lambda each: type(each).__name__
)
def test_a_step_that_one_rank_skipped_is_settled_before_a_state_is_loaded(algorithm: Algorithm) -> None:
    def visit(transport: Transport) -> int:
        ddp = DDP(regression().make_model(), transport, algorithm=algorithm)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        state = save(ddp, optimizer)["algorithm"]
        step(ddp, optimizer, regression(), 0, transport.rank, skip=transport.rank == 1)
        ddp.load_algorithm_state_dict(state)
        step(ddp, optimizer, regression(), 0, transport.rank)
        return int(ddp.algorithm_state_dict()["round"])

    assert on_ranks(visit, 2) == [1, 1]


def test_ranks_that_go_by_the_clock_resume_where_each_has_been() -> None:
    def visit(transport: Transport) -> int:
        state: dict[str, Any] = {}
        for rounds in (transport.rank, 1):
            ddp = DDP(regression().make_model(), transport, algorithm=AsyncModelAverageAlgorithm(10_000))
            if state:
                ddp.load_algorithm_state_dict(state)
            optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
            for number in range(rounds):
                step(ddp, optimizer, regression(), number, transport.rank)
            state = ddp.algorithm_state_dict()
            ddp.close()
        return int(state["round"])

    assert on_ranks(visit, 2) == [1, 2]


def test_a_state_knows_how_far_it_was() -> None:
    def visit(transport: Transport) -> tuple[int, float]:
        algorithm, task = LocalSGDAlgorithm(4), regression()
        _, states = run(transport, algorithm, task, range(3))
        after, _ = run(transport, algorithm, task, [3], [states[-1]] * 2)
        return states[-1]["algorithm"]["round"], float(after[0].sum())

    (rounds, first), (_, second) = on_ranks(visit, 2)
    assert rounds == 3
    assert first == second  # the fourth round is the one that averages
