"""Local training that averages what optimizers remember along with the weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from contracts.grids import SIZES, grid
from contracts.test_algorithms_state import check_resumption
from contracts.training import assert_close, by_step, regression, step, train_world
from ddp.models import fill, values
from murmura import (
    DDP,
    Algorithm,
    DiLoCoAlgorithm,
    LocalSGDAlgorithm,
    StreamingDiLoCoAlgorithm,
    Transport,
    UsageError,
    run_world,
)
from oracles.algorithms.simulation import flat_of, simulate
from oracles.algorithms.streaming_diloco import StreamingDiLoCo
from oracles.algorithms.weights import DiLoCo, LocalSGD, WithMoments
from worlds import SECONDS

STEPS = 5
RULES = {
    "local_sgd": (lambda: LocalSGDAlgorithm(2, average_moments=True), lambda: LocalSGD(2)),
    "diloco": (lambda: DiLoCoAlgorithm(2, average_moments=True), lambda: DiLoCo(2)),
    "streaming_diloco": (
        lambda: StreamingDiLoCoAlgorithm(2, fragments=2, overlap=1, compressor=None, average_moments=True),
        lambda: StreamingDiLoCo(2, 2, 1, 0.5),
    ),
}


@grid("name, size, optimizer", tuple(RULES), SIZES, ("adam", "momentum"), sample=6)
def test_moments_are_averaged_as_simulated(name: str, size: int, optimizer: str) -> None:
    task = regression(optimizer)
    make, rule = RULES[name]
    wanted = simulate(WithMoments(rule()), task, size, STEPS)
    assert_close(by_step(train_world(size, make(), task, STEPS)), wanted)
    if size > 1:
        apart = simulate(rule(), task, size, STEPS)
        assert float((wanted[-1][0] - apart[-1][0]).abs().max()) > 1e-6


@pytest.mark.parametrize("name", ["local_sgd", "streaming_diloco"])
def test_a_resumed_run_continues_bit_for_bit(name: str) -> None:
    check_resumption(3, RULES[name][0](), regression("adam", torch.float32))


def skip_the_first(transport: Transport, algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 1 takes no step in the first two rounds, so its optimizer is not known at the first exchange."""
    task = regression("adam")
    ddp = DDP(task.make_model(), transport, algorithm=algorithm)
    optimizer = task.make_optimizer(ddp.parameters())
    for number in range(4):
        step(ddp, optimizer, task, number, transport.rank, skip=number < 2 and transport.rank == 1)
    ddp.consensus_distance()  # settles what a skipped step has left
    moments = torch.cat([optimizer.state[each]["exp_avg"].view(-1) for each in ddp.parameters()])
    found = flat_of(ddp.module), moments
    ddp.close()
    return found


def test_a_rank_that_has_not_stepped_yet_holds_nobody_up() -> None:
    run_world(skip_the_first, 3, RULES["streaming_diloco"][0](), timeout=SECONDS)
    (weights, moments), *others = run_world(
        skip_the_first, 3, LocalSGDAlgorithm(2, average_moments=True), timeout=SECONDS
    )
    for other_weights, other_moments in others:
        assert torch.equal(weights, other_weights)
        assert torch.equal(moments, other_moments)


class Counting(torch.optim.SGD):
    """Counts the steps of each parameter in a number that is no tensor, as many optimizers do, and divides by it."""

    zero: Any = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["steps"] = state.get("steps", self.zero) + 1
            parameter.data.sub_(parameter.grad, alpha=float(0.1 / state["steps"]))


@pytest.mark.parametrize("zero", [0, np.int64(0), np.float32(0)], ids=["Python", "numpy", "numpy's float32"])
@pytest.mark.parametrize("skipped", [(1,), (0, 1)], ids=["one of two", "both"])
def test_numbers_of_steps_are_averaged_where_replicas_are_to_be_equal(skipped: tuple[int, ...], zero: Any) -> None:
    def run(transport: Transport) -> tuple[torch.Tensor, list[float]]:
        task = regression("sgd")
        ddp = DDP(task.make_model(), transport, algorithm=LocalSGDAlgorithm(1))
        optimizer = Counting(ddp.parameters(), lr=0.1)
        optimizer.zero = zero
        ddp.remember_optimizer(optimizer)
        for number in range(4):
            if number == 2:
                ddp.set_algorithm("gradient_allreduce")
            step(ddp, optimizer, task, number, transport.rank, skip=number in skipped and transport.rank == 2)
        found = flat_of(ddp.module), [state["steps"] for state in optimizer.state.values()]
        ddp.close()
        return found

    wanted = 2 + (6 - len(skipped)) / 3
    (weights, steps), *others = run_world(run, 3, timeout=SECONDS)
    assert steps == pytest.approx([wanted] * len(steps))
    for other_weights, other_steps in others:
        assert torch.equal(weights, other_weights)
        assert steps == other_steps


class Remembering(torch.optim.SGD):
    """Keeps `initial(parameter)` for each parameter that it steps on, and lets `count` change it."""

    initial: Callable[[torch.Tensor], Any]
    count: Callable[[Any], Any]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["kept"] = self.count(state["kept"] if "kept" in state else self.initial(parameter))
        super().step()


WITHOUT_MEAN: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "whole numbers": (torch.tensor(0), lambda kept: kept + 1),
    "quantised": (torch.zeros(3, dtype=torch.uint8), lambda kept: kept + 1),
    "dict": ({"moment": torch.zeros(2)}, lambda kept: {"moment": kept["moment"] + 1}),
    "tuple": ((torch.zeros(2), "a"), lambda kept: (kept[0] + 1, "a")),
    "flag": (False, lambda kept: not kept),
    "list": ([], lambda kept: [*kept, 1]),
}


@pytest.mark.parametrize("average", [False, True], ids=["switch", "average_moments"])
@pytest.mark.parametrize("skips", [False, True], ids=["alike", "apart"])
@pytest.mark.parametrize("kept", WITHOUT_MEAN)
def test_what_has_no_mean_is_refused_where_it_differs(kept: str, skips: bool, average: bool) -> None:
    def run(transport: Transport) -> torch.Tensor:
        task = regression("sgd")
        ddp = DDP(task.make_model(), transport, algorithm=LocalSGDAlgorithm(2, average_moments=average))
        optimizer = Remembering(ddp.parameters(), lr=0.1)
        initial, optimizer.count = WITHOUT_MEAN[kept]
        optimizer.initial = lambda parameter: initial
        for number in range(2):
            step(ddp, optimizer, task, number, transport.rank, skip=skips and number == transport.rank == 1)
        ddp.set_algorithm("gradient_allreduce")
        step(ddp, optimizer, task, 2, transport.rank)
        ddp.close()
        return flat_of(ddp.module)

    if skips:
        with pytest.raises(UsageError, match=r"Remembering keeps 'kept', .* has no mean"):
            run_world(run, 3, timeout=SECONDS)
    else:
        first, *others = run_world(run, 3, timeout=SECONDS)
        assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("value", [1, True, torch.tensor(1)], ids=["number", "flag", "whole numbers"])
def test_what_each_rank_keeps_for_another_parameter_is_not_taken_for_the_same(value: Any) -> None:
    def run(transport: Transport) -> None:
        task = regression("momentum")
        ddp = DDP(task.make_model(), transport, algorithm=LocalSGDAlgorithm(2))
        optimizer = task.make_optimizer(ddp.parameters())
        step(ddp, optimizer, task, 0, transport.rank)
        optimizer.state[list(ddp.parameters())[transport.rank]]["overflows"] = value
        with pytest.raises(UsageError, match=r"same moments|has no mean"):
            ddp.set_algorithm("gradient_allreduce")
        ddp.close()

    run_world(run, 2, timeout=SECONDS)


@pytest.mark.parametrize("kept", ["flag", "whole numbers", "list"])
@pytest.mark.parametrize("name", ["decentralized", "streaming_diloco"])
def test_a_switch_that_is_refused_changes_nothing(name: str, kept: str) -> None:
    def run(transport: Transport) -> torch.Tensor:
        task = regression("sgd")
        ddp = DDP(task.make_model(), transport, algorithm=name)
        optimizer = Remembering(ddp.parameters(), lr=0.1)
        initial, optimizer.count = WITHOUT_MEAN[kept]
        optimizer.initial = lambda parameter: initial
        for number in range(2):
            step(ddp, optimizer, task, number, transport.rank, skip=number == transport.rank == 1)
        if transport.rank == 2:
            del optimizer.state[next(iter(ddp.parameters()))]  # as before its first step
        with pytest.raises(UsageError, match="has no mean"):
            ddp.set_algorithm("gradient_allreduce")
        num_kept = len(optimizer.state)
        for number in range(2, 6):
            step(ddp, optimizer, task, number, transport.rank)
        del optimizer
        gc.collect()
        ddp.set_algorithm("gradient_allreduce")
        step(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), task, 6, transport.rank)
        ddp.close()
        assert num_kept == len(list(ddp.parameters())) - (transport.rank == 2)
        return flat_of(ddp.module)

    first, *others = run_world(run, 3, timeout=SECONDS)
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("kept", ["whole numbers", "list"])
def test_an_optimizer_that_is_refused_at_its_first_step_is_refused_at_the_next(kept: str) -> None:
    def run(transport: Transport) -> torch.Tensor:
        task = regression("sgd")
        ddp = DDP(task.make_model(), transport, algorithm=LocalSGDAlgorithm(2))
        optimizer = Remembering(ddp.parameters(), lr=0.1)
        initial, optimizer.count = WITHOUT_MEAN[kept]
        optimizer.initial = lambda parameter: initial
        for number in range(5):
            if number == 2:
                ddp.set_algorithm("gradient_allreduce")
            if number < 2:
                step(ddp, optimizer, task, number, transport.rank, skip=transport.rank == 1)  # which does not know it
            else:
                with pytest.raises(UsageError, match=r"mean|moments"):
                    step(ddp, optimizer, task, number, transport.rank)
        step(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), task, 5, transport.rank)
        ddp.close()
        return flat_of(ddp.module)

    first, *others = run_world(run, 3, timeout=SECONDS)
    assert all(torch.equal(first, each) for each in others)


def test_the_formula_counts_two_moments() -> None:
    whole = LocalSGDAlgorithm(10).bytes_per_round(1000, 4)
    assert LocalSGDAlgorithm(10, average_moments=True).bytes_per_round(1000, 4) == 3 * whole
    assert DiLoCoAlgorithm(10, average_moments=True).bytes_per_round(1000, 4) == 3 * whole
    streaming = StreamingDiLoCoAlgorithm(10, compressor=None, average_moments=True)
    assert streaming.bytes_per_round(1000, 4) == 3 * whole


class Halves(nn.Module):
    """Two parts for two optimizers, and a scalar in front, beside whose moments a number of steps looks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.parts = nn.ModuleList(fill(nn.Linear(4, 2)) for _ in range(2))

    def forward(self, inputs: torch.Tensor, parts: Sequence[int]) -> torch.Tensor:
        return self.scale * sum(self.parts[each](inputs) for each in parts)


def train_halves(
    transport: Transport, skips: Mapping[int, Collection[tuple[int, int]]], parts: Sequence[Sequence[int]]
) -> list[list[torch.Tensor]]:
    """The moments of two optimizers after three rounds; `skips` has (rank, optimizer) that skip, by round."""
    ddp = DDP(Halves(), transport, algorithm=LocalSGDAlgorithm(3, average_moments=True))
    optimizers = [
        torch.optim.Adam([ddp.module.scale, *ddp.module.parts[0].parameters()], lr=0.1),
        torch.optim.Adam(ddp.module.parts[1].parameters(), lr=0.1),
    ]
    for number in range(3):
        ddp.zero_grad()
        ddp(values(3, 4, seed=10 * number + transport.rank), parts[transport.rank]).square().sum().backward()
        for index, optimizer in enumerate(optimizers):
            if (transport.rank, index) not in skips.get(number, ()):
                optimizer.step()
    ddp.settle()
    for optimizer in optimizers:
        optimizer.state_dict()  # holds nothing of the other one's parameters
    found = [[state["exp_avg"] for state in optimizer.state.values()] for optimizer in optimizers]
    ddp.close()
    return found


BOTH = [[0, 1]] * 2


def test_the_order_in_which_optimizers_came_to_step_does_not_matter() -> None:
    (adam, other_adam), others = run_world(train_halves, 2, {0: [(0, 0)]}, BOTH, timeout=SECONDS)
    assert len(adam) == 3
    assert len(other_adam) == 2
    assert all(map(torch.equal, [*adam, *other_adam], [*others[0], *others[1]]))


def test_moments_of_optimizers_that_not_all_ranks_know_are_left_alone() -> None:
    skips = {number: [(0, 0), (1, 1)] for number in range(3)}  # the one knows the second only, the other the first
    first, second = run_world(train_halves, 2, skips, BOTH, timeout=SECONDS)
    assert [len(each) for each in first] == [0, 2]
    assert [len(each) for each in second] == [3, 0]


def test_moments_of_a_part_that_one_rank_never_used_come_from_the_others() -> None:
    first, second = run_world(train_halves, 2, {}, [[0, 1], [1]], timeout=SECONDS)
    assert [len(each) for each in second] == [3, 2]
    assert all(map(torch.equal, [*first[0], *first[1]], [*second[0], *second[1]]))


def is_matrix(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 2


@pytest.mark.parametrize("make", [torch.optim.Adafactor, Remembering], ids=lambda each: each.__name__)
def test_parameters_that_one_rank_never_stepped_on_get_state_of_their_own_form(
    make: type[torch.optim.Optimizer],
) -> None:
    """Adafactor's is another for a vector than for a matrix, and a flag may tell one from the other."""

    def run(transport: Transport) -> list[Any]:
        ddp = DDP(Halves(), transport, algorithm=LocalSGDAlgorithm(1))
        optimizer = make(ddp.parameters(), lr=0.1)
        if isinstance(optimizer, Remembering):
            optimizer.initial, optimizer.count = is_matrix, bool
        for number in range(3):
            if number == 2:
                ddp.set_algorithm("gradient_allreduce")
            ddp.zero_grad()
            ddp(values(3, 4, seed=10 * number + transport.rank), [0, 1]).square().sum().backward()
            for each in ddp.parameters():
                if number < 2 and transport.rank == 1 and not is_matrix(each):
                    each.grad = None
            optimizer.step()
        kept = [sorted((key, str(value)) for key, value in optimizer.state[each].items()) for each in ddp.parameters()]
        found = [kept, flat_of(ddp.module).tolist()]
        ddp.close()
        return found

    first, second = run_world(run, 2, timeout=SECONDS)
    assert first == second
