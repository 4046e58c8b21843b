"""What compression left over goes on with a compressor that can take it over, and is refused by any other."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from ddp.models import errors_on, fill, on_ranks, values
from murmura import (
    DDP,
    Algorithm,
    Cast,
    ConfigError,
    ErrorFeedback,
    GradientAllReduceAlgorithm,
    MinMaxUInt8,
    Phased,
    QAdamAlgorithm,
    QAdamOptimizer,
    TopK,
    Transport,
)
from murmura.algorithms import algorithm_named


def train(ddp: DDP, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(values(4, 6, seed=10 * step + ddp.transport.rank)).square().mean().backward()
        optimizer.step()


def resume(transport: Transport, then: Algorithm, now: Algorithm) -> dict[str, Any]:
    """The state after some rounds of `now`, which goes on from that of `then`."""
    module = fill(nn.Linear(6, 5))
    state: dict[str, Any] = {}
    for algorithm in (then, now):
        with closing(DDP(module, transport, algorithm=algorithm)) as ddp:
            is_adam = isinstance(algorithm, QAdamAlgorithm)
            optimizer = QAdamOptimizer(ddp.parameters(), 0.1, 1) if is_adam else torch.optim.SGD(ddp.parameters(), 0.1)
            if state:
                ddp.load_algorithm_state_dict(state)
            train(ddp, optimizer, range(3))
            state = ddp.algorithm_state_dict()
    return state


OTHERS = [
    ("gradient_allreduce:compressor=topk", "gradient_allreduce:compressor=sign"),
    ("gradient_allreduce:compressor=sign", "gradient_allreduce:compressor=topk"),
    ("gradient_allreduce:compressor=sign", "gradient_allreduce:compressor=majority_vote"),
    ("gradient_allreduce:compressor=topk", "gradient_allreduce"),
    ("gradient_allreduce:compressor=topk", "gradient_allreduce:compressor=uint8"),
    ("diloco:interval=2:compressor=topk", "diloco:interval=2:compressor=sign"),
    ("diloco:interval=2:compressor=sign", "diloco:interval=2"),
    (
        "streaming_diloco:interval=2:fragments=1:overlap=1",
        "streaming_diloco:interval=2:fragments=1:overlap=1:compressor=topk",
    ),
    ("qadam:compressor=sign", "qadam:compressor=topk"),
]


@pytest.mark.parametrize(("then", "now"), OTHERS)
def test_another_compressor_is_named_when_the_state_is_loaded(then: str, now: str) -> None:
    algorithm = algorithm_named(now)
    for error in errors_on(resume, 2, algorithm_named(then), algorithm):
        assert isinstance(error, ConfigError)
        assert f"compressor={algorithm.compressor!r} cannot load" in str(error)  # type: ignore[attr-defined]


def test_another_compressor_of_a_later_phase_is_named_when_the_state_is_loaded() -> None:
    then, now = (
        Phased("gradient_allreduce", 1, then=f"gradient_allreduce:compressor={each}") for each in ("topk", "sign")
    )
    state = on_ranks(resume, 2, then, then)[0]

    def load(transport: Transport) -> None:
        with closing(DDP(fill(nn.Linear(6, 5)), transport, algorithm=now)) as ddp:
            ddp.load_algorithm_state_dict(state)

    for error in errors_on(load, 2):
        assert isinstance(error, ConfigError)
        assert "Sign(" in str(error)
        assert "cannot load" in str(error)


class Late(ErrorFeedback):
    """Remembers nothing until it has compressed something."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {} if state["residual"] is None else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            super().load_state_dict(state)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (ErrorFeedback(TopK(0.1)), ErrorFeedback(TopK(0.5))),
        (ErrorFeedback(MinMaxUInt8()), ErrorFeedback(Cast(torch.bfloat16))),
        (Late(MinMaxUInt8()), Late(MinMaxUInt8())),
        (MinMaxUInt8(), ErrorFeedback(TopK(0.1))),
        (MinMaxUInt8(), None),
    ],
    ids=["ratio", "inner", "late", "nothing kept", "nothing kept, none"],
)
def test_a_compressor_that_can_take_it_over_goes_on(then: Any, now: Any) -> None:
    algorithms = [GradientAllReduceAlgorithm(compressor=each) for each in (then, now)]
    assert [state["round"] for state in on_ranks(resume, 2, *algorithms)] == [6, 6]


def test_another_number_of_ranks_is_named_as_such() -> None:
    algorithm = GradientAllReduceAlgorithm(compressor=ErrorFeedback(MinMaxUInt8()))
    state = on_ranks(resume, 2, algorithm, algorithm)[0]

    def load(transport: Transport) -> None:
        with closing(DDP(fill(nn.Linear(6, 5)), transport, algorithm=algorithm)) as ddp:
            ddp.load_algorithm_state_dict(state)

    for error in errors_on(load, 3):
        assert isinstance(error, ConfigError)
        assert "saved by 2 ranks that exchange, and here are 3" in str(error)


def thaw(transport: Transport, name: str, resumes: bool) -> torch.Tensor:
    """Weights after rounds with a frozen layer and rounds without; a run that `resumes` between finds it thawed."""
    algorithm = algorithm_named(name)
    module = nn.Sequential(fill(nn.Linear(6, 5)), nn.Tanh(), fill(nn.Linear(5, 4)))
    module[0].requires_grad_(False)
    ddp = DDP(module, transport, algorithm=algorithm)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    train(ddp, optimizer, range(3))
    if resumes:
        state = ddp.algorithm_state_dict()
        ddp.close()
    module[0].requires_grad_(True)
    if resumes:
        ddp = DDP(module, transport, algorithm=algorithm)
        ddp.load_algorithm_state_dict(state)
    train(ddp, optimizer, range(3, 6))
    ddp.close()
    return torch.cat([each.detach().view(-1) for each in module.parameters()])


@pytest.mark.parametrize("compressor", ["topk(ratio=0.2)", "sign", "bf16(feedback=true)"])
def test_a_layer_thawed_when_a_run_resumes_is_one_thawed_while_it_runs(compressor: str) -> None:
    name = f"gradient_allreduce:compressor={compressor}"
    runs = [on_ranks(thaw, 3, name, resumes) for resumes in (False, True)]
    assert all(torch.equal(each, runs[0][0]) for run in runs for each in run)
