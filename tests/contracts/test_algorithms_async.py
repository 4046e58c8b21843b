"""Averages driven by a clock: nobody waits for anybody, nothing is lost or torn, and everything comes to an end."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from contracts.training import assert_close, by_step, regression, spread, standing_still, step, train_world
from ddp.models import number, on_ranks, weight
from murmura import DDP, AsyncModelAverageAlgorithm, ConfigError, Transport
from oracles.algorithms.gradients import AllReduce
from oracles.algorithms.simulation import flat_of, simulate
from oracles.algorithms.weights import AsyncModelAverage

OFTEN = AsyncModelAverageAlgorithm(sync_interval_ms=1)
LONG = 20.0  # seconds in which something that a background thread does must have been seen


def uniform(value: float) -> nn.Module:
    """A model all of whose weights are the same number."""
    model = standing_still().make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def idle(ddp: DDP, optimizer: torch.optim.Optimizer) -> Tensor:
    """A round that changes nothing of its own accord; the weights it was computed with."""
    optimizer.zero_grad()
    output = ddp(torch.ones(2, 5, dtype=torch.float64))
    seen = flat_of(ddp.module)
    output.sum().backward()
    optimizer.step()
    return seen


def test_replicas_at_rest_come_to_their_mean_and_are_never_torn() -> None:
    """All weights of a rank are one number, and must be in every forward, whenever the average comes."""

    def visit(transport: Transport) -> tuple[bool, bool]:
        ddp = DDP(uniform(0), transport, algorithm=OFTEN)
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.fill_([0.0, 3.0, 12.0][transport.rank])
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        whole, deadline = True, time.monotonic() + LONG
        while time.monotonic() < deadline:
            seen = idle(ddp, optimizer)
            whole &= bool((seen == seen[0]).all())
            if float(seen[0]) == 5.0:
                break
        ddp.algorithm.abort()
        arrived = bool((flat_of(ddp.module) == 5.0).all())
        ddp.close()
        return whole, arrived

    assert on_ranks(visit, 3) == [(True, True)] * 3


def test_steps_taken_while_an_average_is_made_are_kept() -> None:
    """Every rank walks one step of 1 a round; an average moves weights between ranks and loses none of the steps."""
    steps = [400, 300, 500]

    def visit(transport: Transport) -> float:
        ddp = DDP(weight(0, torch.float64), transport, algorithm=OFTEN)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        for _ in range(steps[transport.rank]):
            optimizer.zero_grad()
            ddp(number(-1, torch.float64)).sum().backward()
            optimizer.step()
        ddp.algorithm.abort()
        value = ddp.module.weight.item()
        ddp.close()
        return value

    assert sum(on_ranks(visit, 3)) == pytest.approx(sum(steps))


def test_unequal_numbers_of_steps_need_no_abort() -> None:
    def visit(transport: Transport) -> bool:
        ddp = DDP(regression().make_model(), transport, algorithm=OFTEN)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for round_ in range(3 + 20 * transport.rank):
            step(ddp, optimizer, regression(), round_, transport.rank)
        ddp.close()
        return bool(torch.isfinite(flat_of(ddp.module)).all())

    assert on_ranks(visit, 3) == [True] * 3


def test_a_program_may_end_without_closing_anything() -> None:
    def visit(transport: Transport) -> int:
        ddp = DDP(regression().make_model(), transport, algorithm=OFTEN)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for round_ in range(3):
            step(ddp, optimizer, regression(), round_, transport.rank)
        return transport.rank

    assert on_ranks(visit, 2) == [0, 1]


def test_abort_and_resume_may_follow_each_other_as_they_like() -> None:
    def visit(transport: Transport) -> list[bool]:
        ddp = DDP(uniform(0), transport, algorithm=OFTEN)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        algorithm = ddp.algorithm
        moved = []
        for calls in ("abort", "resume", "abort abort", "resume resume", "resume", "abort"):
            for call in calls.split():
                getattr(algorithm, call)()
            transport.barrier()
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.fill_(transport.rank)
            moved.append(moves(ddp, optimizer, wait="resume" in calls))
            transport.barrier()
        ddp.close()
        return moved

    assert on_ranks(visit, 2) == [[False, True, False, True, True, False]] * 2


def moves(ddp: DDP, optimizer: torch.optim.Optimizer, *, wait: bool) -> bool:
    """Whether an average comes: within a few rounds, or, if it must, within a long time."""
    own = float(flat_of(ddp.module)[0])
    deadline = time.monotonic() + LONG
    rounds = 0
    while rounds < 20 or (wait and time.monotonic() < deadline):
        rounds += 1
        if float(idle(ddp, optimizer)[0]) != own:
            return True
    return False


def test_aborted_it_counts_rounds_in_silence() -> None:
    def visit(transport: Transport) -> tuple[float, float]:
        ddp = DDP(weight(0), transport, algorithm=AsyncModelAverageAlgorithm(sync_interval_rounds=1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        ddp.algorithm.abort()
        values = []
        for _ in range(2):
            for _ in range(3):
                optimizer.zero_grad()
                ddp(number(-transport.rank)).sum().backward()
                optimizer.step()
            values.append(ddp.module.weight.item())
            ddp.algorithm.resume()
        ddp.close()
        return values[0], values[1]

    (first, later), (second, later_too) = on_ranks(visit, 2)
    assert (first, second) == (0.0, 3.0)
    assert 0 < later < later_too < 6.0


@pytest.mark.parametrize("warmup", [1, 3, 4])
def test_a_warm_up_shares_gradients(warmup: int) -> None:
    class Warmed(AsyncModelAverage):
        """All-reduce first; the rule of rounds after it."""

        takes_buffers_of_rank_0 = False

        def before_forward(self, replicas: object) -> None:
            if replicas.round >= warmup:
                super().before_forward(replicas)

        def after_backward(self, replicas: object) -> None:
            if replicas.round < warmup:
                AllReduce().after_backward(replicas)

    algorithm = AsyncModelAverageAlgorithm(sync_interval_rounds=2, warmup_rounds=warmup)
    flats = by_step(train_world(3, algorithm, regression("momentum"), 8))
    assert_close(flats, simulate(Warmed(2), regression("momentum"), 3, 8))
    assert spread(flats[warmup - 1]) == 0
    assert spread(flats[warmup]) > 0


@pytest.mark.parametrize(
    "choices", [{"sync_interval_ms": -1}, {"sync_interval_rounds": 0}, {"warmup_rounds": -1}], ids=str
)
def test_senseless_choices_are_refused(choices: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(choices))):
        AsyncModelAverageAlgorithm(**choices)
