"""When an algorithm communicates, at which weights the gradient is taken, and what a skipped step changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from contracts.catalogue import INNER, Entry, every
from contracts.training import Run, Shard, assert_close, by_step, regression, spread, step
from ddp.models import number, on_ranks, weight
from murmura import (
    DDP,
    Algorithm,
    DecentralizedAlgorithm,
    TracedTransport,
    Transport,
)
from oracles.algorithms.lives import ForgetsSkipped, Unscaled
from oracles.algorithms.simulation import Task, flat_of, simulate

# A quadratic: rank r has the loss (x - r)^2 / 2, whose gradient is x - r

RATE = 0.25
SCALE = 2.0**8  # a power of two: it changes no bit of what compressors round


def well(model: nn.Module, rank: int) -> Tensor:
    return (model(number(1, torch.float64)).sum() - rank) ** 2 / 2


def quadratic(transport: Transport, algorithm: Algorithm, rounds: int) -> list[float]:
    """This rank's weight after each round, from 8 times its rank."""
    ddp = DDP(weight(0, torch.float64), transport, algorithm=algorithm)
    with torch.no_grad():
        ddp.module.weight.fill_(8 * transport.rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    path = []
    for _ in range(rounds):
        optimizer.zero_grad()
        well(ddp, transport.rank).backward()
        optimizer.step()
        path.append(ddp.module.weight.item())
    return path


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_the_gradient_is_taken_before_the_average_and_averages_come_at_every_interval(mode: str, interval: int) -> None:
    """Two ranks: their mean goes to 1/2 by a factor 1 - lr a round. Half their distance d is d <- -lr d + lr/2 in a
    round with an average, since the gradient is that of the weights before it, and else d <- (1 - lr) d + lr/2."""
    rounds = 8
    paths = on_ranks(quadratic, 2, DecentralizedAlgorithm(True, mode, interval), rounds)
    distance = 4.0
    for done in range(1, rounds + 1):
        middle = 0.5 + (4.0 - 0.5) * (1 - RATE) ** done
        factor = -RATE if (done - 1) % interval == 0 else 1 - RATE
        distance = factor * distance + RATE / 2
        assert paths[0][done - 1] == pytest.approx(middle - distance, abs=1e-12)
        assert paths[1][done - 1] == pytest.approx(middle + distance, abs=1e-12)


# When the wire is used

IN_BACKGROUND = ("async", "streaming_diloco", "streaming_uint4")  # whose exchanges go on after the step


def operations_by_round(transport: Transport, algorithm: Callable[[], Algorithm], task: Task, rounds: int) -> list[int]:
    """How many operations each round took, with an evaluation between any two that must take none."""
    with TracedTransport(transport) as traced:
        ddp = DDP(task.make_model(), traced, algorithm=algorithm())
        optimizer = task.make_optimizer(ddp.parameters())
        counts = []
        for number_ in range(rounds):
            before = len(traced.operations)
            step(ddp, optimizer, task, number_, transport.rank)
            counts.append(len(traced.operations) - before)
            ddp.eval()
            quiet = len(traced.operations)
            with torch.no_grad():
                ddp(task.shard(number_, 0, 0)[0])
            ddp(task.shard(number_, 0, 0)[0])
            assert len(traced.operations) == quiet, "an evaluation has communicated"
            ddp.train()
        ddp.close()
        return counts


@every(lambda entry: entry.name not in IN_BACKGROUND)
def test_evaluation_never_communicates(entry: Entry) -> None:
    for counts in on_ranks(operations_by_round, 2, entry.make, entry.fit(regression()), 5):
        assert sum(counts) > 0


@every(lambda entry: entry.name in IN_BACKGROUND)
def test_evaluation_starts_no_exchange_in_the_background(entry: Entry) -> None:
    """Its operations may last into an evaluation; their number is that of a run without any."""

    task = entry.fit(regression())

    def operations(transport: Transport, evaluate: bool) -> int:
        with TracedTransport(transport) as traced:
            ddp = DDP(task.make_model(), traced, algorithm=entry.make())
            optimizer = task.make_optimizer(ddp.parameters())
            for number_ in range(5):
                step(ddp, optimizer, task, number_, transport.rank)
                ddp.eval()
                for _ in range(2 * evaluate):
                    ddp(task.shard(number_, 0, 0)[0])
                ddp.train()
            ddp.algorithm_state_dict()  # which waits for what is under way
            ddp.close()
            return len(traced.operations)

    assert on_ranks(operations, 2, True) == on_ranks(operations, 2, False)


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("mode", ["all", "shift_one"])
def test_rounds_between_intervals_are_silent(mode: str, interval: int) -> None:
    make = functools.partial(DecentralizedAlgorithm, True, mode, interval)
    for counts in on_ranks(operations_by_round, 2, make, regression(), 7):
        assert [count > 0 for count in counts] == [number_ % interval == 0 for number_ in range(7)]


# Steps that GradScaler skips


def broken_data(rank_of_round: dict[int, int], round_: int, micro: int, rank: int) -> Shard:
    """Data that gives one rank a gradient without a number in it, in some rounds."""
    inputs, targets = regression().shard(round_, micro, rank)
    return (inputs * torch.inf if rank_of_round.get(round_) == rank else inputs), targets


def train_scaled(transport: Transport, entry: Entry, task: Task, rounds: int, keeps_scale: bool = False) -> Run:
    """The loop of a user of GradScaler, whose scale changes on the rank that skipped, unless it is kept."""
    ddp = DDP(task.make_model(), transport, algorithm=entry.make())
    optimizer = task.make_optimizer(ddp.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    run = Run()
    for number_ in range(rounds):
        run.layouts.append([list(bucket.names) for bucket in ddp._replica.buckets])
        optimizer.zero_grad()
        scaler.scale(task.loss(ddp, task.shard(number_, 0, transport.rank))).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        run.observed.append(scaler.get_scale() < before)
        if keeps_scale:
            scaler.update(SCALE)
        run.flats.append(flat_of(ddp.module))
    ddp.close()
    return run


BROKEN = {1: 0, 3: 2, 4: 1}  # the rank that has a broken gradient, by round


@every(lambda entry: not entry.lockstep, in_pairs=True)
def test_one_rank_may_skip_a_step(entry: Entry) -> None:
    """It takes part in the exchange all the same, at its next forward at the latest, and then holds what it must."""
    task = replace(regression("momentum"), shard=functools.partial(broken_data, BROKEN))
    runs = on_ranks(train_scaled, 3, entry, task, 7)
    skips = list(BROKEN.items())
    assert [[run.observed[number_] for number_ in range(7)] for run in runs] == [
        [(number_, rank) in skips for number_ in range(7)] for rank in range(3)
    ]
    assert_close(by_step(runs), simulate(entry.rule(runs), task, 3, 7, skips=skips), but=skips)


@every(lambda entry: entry.lockstep)
def test_all_ranks_skip_a_step_together_if_they_share_their_steps(entry: Entry) -> None:
    """Also where gradients stay local and only one rank's scale goes down: QAdam's after its warm-up of three steps."""
    broken = {1: 0, 5: 2}
    # What feedback kept has the scale of its round, so a new scale counts (see the guide), and votes have no scale.
    keeps_scale = entry.name in (*INNER, "powersgd", "majority_vote")
    task = entry.fit(replace(regression("momentum"), shard=functools.partial(broken_data, broken)))
    runs = on_ranks(train_scaled, 3, entry, task, 8, keeps_scale)
    skips = [(number_, rank) for number_ in broken for rank in range(3)]
    told = [(number_, rank) for rank, run in enumerate(runs) for number_ in range(8) if run.observed[number_]]
    assert sorted(told) == ([*skips[:3], (5, 2)] if entry.optimizer is not None else skips)
    rule = entry.rule(runs)
    rule = Unscaled(rule, SCALE) if entry.name == "majority_vote" else ForgetsSkipped(rule)
    flats = by_step(runs)
    assert_close(flats, simulate(rule, task, 3, 8, skips=skips), within=0.0 if entry.is_exact else 1e-9)
    assert all(torch.equal(flats[number_][rank], flats[number_ - 1][rank]) for number_, rank in skips)
    assert all(spread(each) == 0 for each in flats)
