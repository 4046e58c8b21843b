"""States that are loaded by hand, when steps are skipped and algorithms change: moments are averaged all the same."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from contracts.grids import grid
from contracts.training import regression, step
from ddp.models import all_equal, on_ranks
from murmura import DDP, Algorithm, Phased, Transport
from oracles.algorithms.simulation import Task, flat_of

GRADIENTS = "gradient_allreduce"
WEIGHTS = ("local_sgd:interval=2", "diloco:interval=2", "streaming_diloco:interval=2:fragments=1", "shift_one")
NOBODY: Collection[int] = ()


class Life(NamedTuple):
    """A model that is wrapped, with its optimizer."""

    task: Task
    ddp: DDP
    optimizer: Optimizer

    def step(self, number: int, skips: Collection[int] = NOBODY) -> None:
        rank = self.ddp.transport.rank
        step(self.ddp, self.optimizer, self.task, number, rank, skip=rank in skips)

    def moments(self) -> Tensor:
        states = [self.optimizer.state[each] for each in self.ddp.parameters()]
        return torch.cat([state.get("exp_avg", state.get("momentum_buffer")).view(-1).clone() for state in states])


def begin(transport: Transport, algorithm: Algorithm | str, optimizer: str) -> Life:
    return wrap(transport, algorithm, regression(optimizer, torch.float32))


def wrap(transport: Transport, algorithm: Algorithm | str, task: Task) -> Life:
    ddp = DDP(task.make_model(), transport, algorithm=algorithm)
    return Life(task, ddp, task.make_optimizer(ddp.parameters()))


def resume(life: Life, algorithm: Algorithm | str, *, tells: bool, is_old: bool = False) -> Life:
    """Go on in a new life, in the order of docs/checkpoints.md; DDP is told of the optimizer if `tells`."""
    state = copy.deepcopy(life.ddp.algorithm_state_dict())
    weights, moments = copy.deepcopy((life.ddp.state_dict(), life.optimizer.state_dict()))
    life.ddp.close()
    life = wrap(life.ddp.transport, algorithm, life.task)
    life.ddp.load_state_dict(weights)
    life.optimizer.load_state_dict(moments)
    if is_old:
        del state["moments"]
    life.ddp.load_algorithm_state_dict(state)
    if tells:
        life.ddp.remember_optimizer(life.optimizer)
    return life


# An algorithm that keeps replicas equal follows


def change(
    transport: Transport, algorithm: str, optimizer: str, by: str, skips: Collection[int], tells: bool
) -> list[Tensor]:
    """Resumed before the change, and after it before a step; some skip the last step before, all the first after."""
    running: Algorithm | str = algorithm if by == "hand" else Phased(algorithm, 4, then=GRADIENTS)
    life = begin(transport, running, optimizer)
    for number in range(3):
        life.step(number)
    life = resume(life, running, tells=tells)
    life.step(3, skips)
    if by == "hand":
        running = GRADIENTS
        life.ddp.set_algorithm(running)
        life = resume(life, running, tells=tells)
    life.step(4, range(transport.world_size))
    life.optimizer.zero_grad()
    life = resume(life, running, tells=tells)
    for number in range(5, 8):
        life.step(number)
    life.ddp.verify_in_sync()
    found = [flat_of(life.ddp.module), life.moments()]
    life.ddp.close()
    return found


@grid(
    "algorithm, optimizer, by, skips, tells",
    WEIGHTS,
    ("momentum", "adam"),
    ("hand", "phases"),
    (NOBODY, (0,), (0, 1, 2)),
    (False, True),
    sample=4,
)
def test_a_change_between_two_resumes_starts_from_equal_moments(
    algorithm: str, optimizer: str, by: str, skips: Collection[int], tells: bool
) -> None:
    assert all_equal(on_ranks(change, 3, algorithm, optimizer, by, skips, tells))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_change_when_one_rank_has_skipped_its_only_step(resumes: bool, optimizer: str) -> None:
    """Where nothing was resumed, it has no moments at all: the others' are averaged with zeros."""

    def run(transport: Transport) -> list[Tensor]:
        life = begin(transport, "local_sgd:interval=2", optimizer)
        if resumes:
            life.step(0)
            life = resume(life, "local_sgd:interval=2", tells=False)
        life.step(1, [0])
        life.ddp.set_algorithm(GRADIENTS)
        for number in range(2, 4):
            life.step(number)
        life.ddp.verify_in_sync()
        found = [flat_of(life.ddp.module), life.moments()]
        life.ddp.close()
        return found

    assert all_equal(on_ranks(run, 3))


@pytest.mark.parametrize("tells", [False, True])
def test_a_run_that_has_changed_its_algorithm_resumes_bit_for_bit(tells: bool) -> None:
    """Its moments are equal by then: a mean of three would round them."""

    def run(transport: Transport, resumes: bool) -> list[Tensor]:
        life = begin(transport, "local_sgd:interval=2", "adam")
        for number in range(3):
            life.step(number)
        life.ddp.set_algorithm(GRADIENTS)
        for number in range(3, 8):
            if resumes and number > 3:
                life = resume(life, GRADIENTS, tells=tells)
            life.step(number)
        found = [flat_of(life.ddp.module), life.moments()]
        life.ddp.close()
        return found

    assert all_equal([*on_ranks(run, 3, False), *on_ranks(run, 3, True)])


def test_a_state_of_an_earlier_version_says_nothing_about_moments() -> None:
    def run(transport: Transport) -> list[Tensor]:
        life = begin(transport, GRADIENTS, "adam")
        life.step(0)
        life = resume(life, GRADIENTS, tells=False, is_old=True)
        life.step(1)
        found = [flat_of(life.ddp.module)]
        life.ddp.close()
        return found

    assert all_equal(on_ranks(run, 2))


def test_moments_that_are_loaded_into_a_model_that_has_trained_are_averaged_too() -> None:
    """Its optimizer is known, but not what it holds now."""

    def run(transport: Transport) -> list[Tensor]:
        life = begin(transport, "local_sgd:interval=2", "momentum")
        for number in range(3):
            life.step(number)
        life = resume(life, "local_sgd:interval=2", tells=False)
        life.ddp.set_algorithm(GRADIENTS)
        state = copy.deepcopy(life.ddp.algorithm_state_dict())
        weights, moments = copy.deepcopy((life.ddp.state_dict(), life.optimizer.state_dict()))
        life.step(3)
        life.ddp.load_state_dict(weights)
        life.optimizer.load_state_dict(moments)
        life.ddp.load_algorithm_state_dict(state)
        life.step(3)
        life.step(4)
        life.ddp.verify_in_sync()
        life.ddp.close()
        return [life.moments()]

    assert all_equal(on_ranks(run, 2))


# Moments that are averaged with the weights

AVERAGING = (
    "local_sgd:interval=2:average_moments=true",
    "diloco:interval=2:average_moments=true",
    "streaming_diloco:interval=2:fragments=2:overlap=1:compressor=none:average_moments=true",
)


def local(
    transport: Transport, algorithm: str, cuts: Collection[int], skips: Collection[int], tells: bool
) -> list[Tensor]:
    """Some ranks skip the step of round 3, after which moments are averaged; returns weights and moments of round 5."""
    life = begin(transport, algorithm, "adam")
    for number in range(5):
        if number in cuts:
            life = resume(life, algorithm, tells=tells)
        life.step(number, skips if number == 3 else NOBODY)
    life.ddp.settle()
    found = [flat_of(life.ddp.module), life.moments()]
    life.ddp.close()
    return found


@grid("algorithm, cuts, skips", AVERAGING, ((3,), (3, 4)), ((0,), (0, 1, 2)), sample=3)
def test_moments_are_averaged_when_the_first_step_after_a_resume_is_skipped(
    algorithm: str, cuts: Collection[int], skips: Collection[int]
) -> None:
    """In the next round, unless DDP was told of the optimizer: then to the bit as without a resume."""
    resumed = on_ranks(local, 3, algorithm, cuts, skips, False)
    moments = [[moments] for _, moments in resumed]
    assert all_equal(moments)
    told, straight = (on_ranks(local, 3, algorithm, each, skips, True) for each in (cuts, NOBODY))
    for one, other in zip(told, straight, strict=True):
        assert all_equal([one, other])


def test_pending_moments_come_after_the_first_of_two_rounds_without_a_forward_of_the_model() -> None:
    """Rank 1 runs two backwards of a part before it steps: its second round has ended when the first is settled."""

    def run(transport: Transport) -> list[Tensor]:
        life = begin(transport, AVERAGING[0], "adam")
        for number in range(3):
            life.step(number)
        life = resume(life, AVERAGING[0], tells=False)
        for number in (3, 4, 5):
            life.optimizer.zero_grad()
            inputs = torch.full((2, 5), 1.0 + number + transport.rank)
            life.ddp.module[4](life.ddp.module[:4](inputs)).square().sum().backward()
            if number > 3 or transport.rank == 0:
                life.optimizer.step()
        life.ddp.settle()
        found = [life.moments()]
        life.ddp.close()
        return found

    assert all_equal(on_ranks(run, 2))


def test_pending_moments_of_the_last_round_wait_for_its_step() -> None:
    """Rank 1 settles two rounds before the step of the second; rank 2 knows no optimizer when it settles the first."""

    def run(transport: Transport) -> list[Tensor]:
        life, rank = begin(transport, AVERAGING[0], "adam"), transport.rank
        for number in range(3):
            life.step(number)
        life = resume(life, AVERAGING[0], tells=False)
        life.step(3, (1, 2))
        if rank == 1:  # no forward of the model tells that a round begins
            sum((rank + each).square().sum() for each in life.ddp.parameters()).backward()  # type: ignore[union-attr]
            life.optimizer.step()
        else:
            life.step(4)
        found = [life.moments()]
        life.ddp.close()
        return found

    assert all_equal(on_ranks(run, 3))


def test_a_world_of_one_has_no_moments_to_average() -> None:
    resumed, straight = (on_ranks(local, 1, AVERAGING[0], cuts, (0,), False) for cuts in ((3, 4), NOBODY))
    assert all_equal([*resumed, *straight])
