"""One model, several algorithms in turn: nothing of the one is left in the next."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contracts.catalogue import CATALOGUE, EVERYTHING, Entry, every, qadam_optimizer
from contracts.training import regression, scatter, spread, step
from ddp.models import fill, on_ranks
from murmura import (
    DDP,
    Algorithm,
    ByteGradAlgorithm,
    ConfigError,
    DecentralizedAlgorithm,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    MinMaxUInt8,
    Phased,
    QAdamAlgorithm,
    Transport,
    UsageError,
)
from oracles.algorithms.simulation import flat_of

TASK = regression("sgd", torch.float32)
SWITCH = 6  # a multiple of every interval, so that a run that begins anew is in step with one that goes on


def go(ddp: DDP, optimizer: torch.optim.Optimizer, rounds: Sequence[int]) -> list[Tensor]:
    flats = []
    for number in rounds:
        step(ddp, optimizer, TASK, number, ddp.transport.rank)
        flats.append(flat_of(ddp.module))
    return flats


def test_every_algorithm_in_turn_on_one_live_model() -> None:
    def visit(transport: Transport) -> list[tuple[str, Tensor, Tensor]]:
        ddp = DDP(TASK.make_model(), transport)
        optimizer = qadam_optimizer(ddp.parameters())
        seen = []
        order = [*EVERYTHING, *reversed(EVERYTHING), EVERYTHING[0]]
        for number, entry in enumerate(order):
            ddp.set_algorithm(entry.make())
            start = flat_of(ddp.module)
            seen.append((entry.name, start, go(ddp, optimizer, range(3 * number, 3 * number + 3))[-1]))
        assert ddp.algorithm_state_dict()["round"] == 3 * len(order)
        ddp.close()
        return seen

    by_rank = on_ranks(visit, 3)
    lockstep = {entry.name for entry in EVERYTHING if entry.lockstep}
    for turn in zip(*by_rank, strict=True):
        names, starts, ends = zip(*turn, strict=True)
        assert spread(starts) == 0, f"{names[0]} began with different replicas"
        assert all(bool(torch.isfinite(end).all()) for end in ends)
        if names[0] in lockstep:
            assert spread(ends) == 0


def test_every_algorithm_has_a_name() -> None:
    def visit(transport: Transport) -> list[str]:
        ddp = DDP(TASK.make_model(), transport)
        optimizer = qadam_optimizer(ddp.parameters())
        running = []
        for number, entry in enumerate(CATALOGUE):
            ddp.set_algorithm(entry.name)
            go(ddp, optimizer, [number])
            running.append(type(ddp.algorithm).__name__)
        ddp.close()
        return running

    for running in on_ranks(visit, 2):
        assert running == [type(entry.make()).__name__ + "Impl" for entry in CATALOGUE]


def test_a_wrong_name_is_answered_with_the_right_ones() -> None:
    def visit(transport: Transport) -> str:
        with pytest.raises(ConfigError, match="shiftone") as refusal:
            DDP(TASK.make_model(), transport, algorithm="shiftone")
        return str(refusal.value)

    for words in on_ranks(visit, 1):
        assert all(f"'{entry.name}'" in words for entry in CATALOGUE)


@every(in_pairs=True)
def test_what_comes_after_a_switch_is_what_a_new_wrapper_would_do(entry: Entry) -> None:
    def visit(transport: Transport, first: Algorithm) -> tuple[list[Tensor], list[Tensor]]:
        ddp = DDP(TASK.make_model(), transport, algorithm=first)
        optimizer = qadam_optimizer(ddp.parameters())
        go(ddp, optimizer, range(SWITCH))
        ddp.set_algorithm(entry.make())
        weights, momenta = copy.deepcopy(ddp.state_dict()), copy.deepcopy(optimizer.state_dict())
        went_on = go(ddp, optimizer, range(SWITCH, SWITCH + 4))
        ddp.close()

        model = TASK.make_model()
        model.load_state_dict(weights)
        optimizer = qadam_optimizer(model.parameters())
        optimizer.load_state_dict(momenta)
        # A new QAdam knows that its optimizer is warm already if it is told which one it is.
        algorithm = entry.make()
        if isinstance(algorithm, QAdamAlgorithm):
            algorithm = replace(algorithm, optimizer=optimizer)
        anew = DDP(model, transport, algorithm=algorithm)
        began_anew = go(anew, optimizer, range(SWITCH, SWITCH + 4))
        anew.close()
        return went_on, began_anew

    for first in (
        DecentralizedAlgorithm(True, "shift_one"),
        ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8())),
    ):
        for went_on, began_anew in on_ranks(visit, 3, first):
            for one, other in zip(went_on, began_anew, strict=True):
                assert torch.allclose(one, other, atol=1e-6), f"{entry.name} is another after {first}"


# Phased


PHASES: dict[str, Callable[[], tuple[Algorithm, Algorithm]]] = {
    "warm-up": lambda: (GradientAllReduceAlgorithm(), ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8()))),
    "cool-down": lambda: (DecentralizedAlgorithm(True, "shift_one"), GradientAllReduceAlgorithm()),
    "ring": lambda: (LocalSGDAlgorithm(2), LowPrecisionDecentralizedAlgorithm()),
}


@pytest.mark.parametrize("phases", PHASES)
@pytest.mark.parametrize("until", [1, 4])
def test_phases_are_switches_at_a_round(phases: str, until: int) -> None:
    def by_hand(transport: Transport) -> list[Tensor]:
        first, then = PHASES[phases]()
        ddp = DDP(TASK.make_model(), transport, algorithm=first)
        optimizer = TASK.make_optimizer(ddp.parameters())
        flats = go(ddp, optimizer, range(until))
        ddp.set_algorithm(then)
        flats += go(ddp, optimizer, range(until, 8))
        ddp.close()
        return flats

    def phased(transport: Transport) -> list[Tensor]:
        first, then = PHASES[phases]()
        ddp = DDP(TASK.make_model(), transport, algorithm=Phased(first, until, then=then))
        flats = go(ddp, TASK.make_optimizer(ddp.parameters()), range(8))
        ddp.close()
        return flats

    for wanted, got in zip(on_ranks(by_hand, 3), on_ranks(phased, 3), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_a_run_of_phases_resumes_in_the_phase_it_was_in(cut: int) -> None:
    def visit(transport: Transport) -> bool:
        algorithm = Phased(GradientAllReduceAlgorithm(), 3, then=LowPrecisionDecentralizedAlgorithm())
        ddp = DDP(TASK.make_model(), transport, algorithm=algorithm)
        optimizer = TASK.make_optimizer(ddp.parameters())
        go(ddp, optimizer, range(cut))
        saved: dict[str, Any] = copy.deepcopy([ddp.state_dict(), optimizer.state_dict(), ddp.algorithm_state_dict()])
        wanted = go(ddp, optimizer, range(cut, 7))
        ddp.close()
        again = DDP(TASK.make_model(), transport, algorithm=algorithm)
        optimizer = TASK.make_optimizer(again.parameters())
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        again.load_algorithm_state_dict(saved[2])
        got = go(again, optimizer, range(cut, 7))
        again.close()
        return all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))

    assert on_ranks(visit, 3) == [True] * 3


def test_phases_that_never_begin_are_refused() -> None:
    with pytest.raises(ConfigError):
        Phased(GradientAllReduceAlgorithm(), -1, then=LocalSGDAlgorithm(2))


# Replicas that differ


def apart() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))


def scattered(rank: int) -> nn.Module:
    model = apart()
    scatter(model, rank)
    with torch.no_grad():
        model[1].running_mean.add_(rank)
        model[1].num_batches_tracked.add_(rank)
    return model


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_consensus_distance_and_mean_are_those_of_plain_arithmetic(size: int) -> None:
    def visit(transport: Transport) -> tuple[float, Tensor, Tensor, bool, int]:
        model = scattered(transport.rank)
        before = copy.deepcopy(model.state_dict())
        ddp = DDP(model, transport, algorithm=DecentralizedAlgorithm())
        ddp.load_state_dict(before)  # wrapping has made the replicas equal
        distance = ddp.consensus_distance()
        with ddp.average_parameters():
            inside, tracked = flat_of(ddp.module), int(ddp.module[1].num_batches_tracked)
        after = ddp.state_dict()
        same = all(torch.equal(before[name], after[name]) for name in before)
        ddp.close()
        return distance, inside, flat_of(model), same, tracked

    models = [scattered(rank) for rank in range(size)]
    flats = [torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]) for model in models]
    centre = torch.stack(flats).double().mean(0)
    distance = torch.stack([(flat - centre).square().sum() for flat in flats]).mean().sqrt()
    wanted = torch.stack([flat_of(model) for model in models]).double().mean(0)
    results = on_ranks(visit, size)
    assert len({result[0] for result in results}) == 1
    for rank, (got, inside, _, same, tracked) in enumerate(results):
        assert got == pytest.approx(float(distance), rel=1e-9, abs=1e-12)
        assert torch.allclose(inside.double(), wanted, atol=1e-6)
        assert torch.equal(inside, results[0][1])
        assert same
        assert tracked == rank


def test_the_own_weights_come_back_also_after_an_error() -> None:
    def visit(transport: Transport) -> bool:
        ddp = DDP(TASK.make_model(), transport, algorithm=DecentralizedAlgorithm())
        scatter(ddp.module, transport.rank)
        before = flat_of(ddp.module)
        with pytest.raises(KeyError), ddp.average_parameters():
            assert not torch.equal(flat_of(ddp.module), before)
            raise KeyError
        return torch.equal(flat_of(ddp.module), before)

    assert on_ranks(visit, 2) == [True, True]


def train_lbfgs(ddp: DDP, rank: int, optimizer: torch.optim.LBFGS | None = None) -> torch.optim.LBFGS:
    """A few steps of `optimizer`, or of a new one."""
    inputs, targets = TASK.shard(0, 0, rank)

    def closure() -> Tensor:
        ddp.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), targets)
        loss.backward()
        return loss

    optimizer = optimizer or torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=2)
    for _ in range(4):
        optimizer.step(closure)
    return optimizer


def switch_under_lbfgs(transport: Transport) -> bool:
    """Whether the replicas are equal after a step of an optimizer that is as old as the switch."""
    ddp = DDP(TASK.make_model(), transport, algorithm=LocalSGDAlgorithm(3))
    optimizer = train_lbfgs(ddp, transport.rank)
    with pytest.raises(UsageError, match=r"LBFGS keeps 'al', a list.*Delete this LBFGS, change the algorithm"):
        ddp.set_algorithm("gradient_allreduce")
    train_lbfgs(ddp, transport.rank, optimizer)  # goes on as before
    del optimizer
    gc.collect()
    ddp.set_algorithm("gradient_allreduce")
    train_lbfgs(ddp, transport.rank)
    ddp.verify_in_sync()
    return ddp.consensus_distance() == 0


def test_an_optimizer_whose_state_has_no_mean_does_not_outlive_a_switch() -> None:
    assert on_ranks(switch_under_lbfgs, 2) == [True, True]


def resume_lbfgs_after_a_switch(transport: Transport) -> bool:
    """Whether the replicas are equal after a resume and another switch with an optimizer that began after the first."""
    ddp = DDP(TASK.make_model(), transport, algorithm=LocalSGDAlgorithm(3))
    ddp.set_algorithm("gradient_allreduce")
    before = train_lbfgs(ddp, transport.rank)
    saved = copy.deepcopy([ddp.state_dict(), before.state_dict(), ddp.algorithm_state_dict()])
    ddp.close()
    ddp = DDP(TASK.make_model(), transport, algorithm="gradient_allreduce")
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=2)
    for each, state in zip((ddp, optimizer), saved[:2], strict=True):
        each.load_state_dict(state)
    ddp.load_algorithm_state_dict(saved[2])
    ddp.remember_optimizer(optimizer)
    train_lbfgs(ddp, transport.rank, optimizer)
    ddp.set_algorithm("bytegrad")
    train_lbfgs(ddp, transport.rank, optimizer)
    ddp.verify_in_sync()
    return ddp.consensus_distance() == 0


def test_lists_that_are_equal_on_all_ranks_need_no_mean() -> None:
    assert on_ranks(resume_lbfgs_after_a_switch, 2) == [True, True]


def test_a_rank_alone_keeps_its_optimizer_whatever_it_holds() -> None:
    def visit(transport: Transport) -> None:
        ddp = DDP(TASK.make_model(), transport, algorithm=LocalSGDAlgorithm(3))
        optimizer = train_lbfgs(ddp, transport.rank)
        ddp.set_algorithm("gradient_allreduce")
        train_lbfgs(ddp, transport.rank, optimizer)

    on_ranks(visit, 1)
