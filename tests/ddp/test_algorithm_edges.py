"""Where a wrapper and its algorithm could come apart: closures, freezing, eval mode, rolling back, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp.models import backward, fill, number, on_ranks, values, weight
from murmura import (
    DDP,
    AsyncModelAverageAlgorithm,
    ConfigError,
    GradientAllReduceAlgorithm,
    InProcessTransport,
    LocalSGDAlgorithm,
    Phased,
    QAdamAlgorithm,
    QAdamOptimizer,
    Transport,
    UsageError,
)


def loss_after(transport: Transport, algorithm: str, closes: bool) -> float:
    ddp = DDP(fill(nn.Linear(4, 1)), transport, algorithm=algorithm)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    inputs = values(8, 4, seed=transport.rank)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    for _ in range(20):
        if closes:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    end = closure().item()
    optimizer.step()
    ddp.close()
    return end


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized", "shift_one", "local_sgd", "bytegrad"])
def test_a_closure_trains_as_a_plain_step_does(algorithm: str) -> None:
    assert on_ranks(loss_after, 2, algorithm, True) == on_ranks(loss_after, 2, algorithm, False)


def test_what_is_frozen_is_averaged_too_when_the_algorithm_changes() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(nn.Sequential(weight(), weight()), transport, algorithm=LocalSGDAlgorithm(100))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        backward(ddp, transport.rank + 1)
        optimizer.step()
        ddp.module[0].requires_grad_(False)
        assert ddp.consensus_distance() > 0
        ddp.set_algorithm("gradient_allreduce")
        return ddp.consensus_distance()

    assert on_ranks(run, 2) == [0.0, 0.0]


def test_thawing_after_the_algorithm_started_is_refused_where_weights_are_exchanged() -> None:
    def run(transport: Transport) -> str:
        ddp = DDP(nn.Sequential(weight(), weight()), transport)
        ddp.module[0].requires_grad_(False)
        ddp.set_algorithm(LocalSGDAlgorithm(1))
        ddp.module[0].requires_grad_(True)
        with pytest.raises(UsageError) as refusal:
            ddp(number(1))
        return str(refusal.value)

    assert all("'0.weight' was frozen when the running algorithm started" in each for each in on_ranks(run, 2))


@pytest.mark.parametrize("name", ["decentralized", "shift_one", "local_sgd"])
def test_a_module_in_eval_mode_trains_too(name: str) -> None:
    def run(transport: Transport) -> list[float]:
        algorithm = LocalSGDAlgorithm(1) if name == "local_sgd" else name
        ddp = DDP(weight(), transport, algorithm=algorithm)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        ddp.eval()
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            backward(ddp, transport.rank + 1)
            optimizer.step()
            seen.append(ddp.module.weight.item())
        return seen

    apart = on_ranks(run, 2)
    started = weight().weight.item()
    steps = [started - first for first, _ in apart]
    if name == "local_sgd":
        assert apart[0] == apart[1]
    else:
        mean = sum(first for first, _ in apart) / 2
        assert [second for _, second in apart] == pytest.approx([mean - step for step in steps])


@pytest.mark.parametrize("name", ["decentralized", "async"])
def test_what_is_under_way_does_not_overwrite_weights_that_are_loaded(name: str) -> None:
    def run(transport: Transport) -> float:
        algorithm = AsyncModelAverageAlgorithm(sync_interval_rounds=1) if name == "async" else name
        ddp = DDP(weight(), transport, algorithm=algorithm)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        saved = {key: value.clone() for key, value in ddp.state_dict().items()}
        backward(ddp, transport.rank + 1)
        optimizer.step()
        backward(ddp, transport.rank + 1)  # and no step
        ddp.load_state_dict(saved)
        ddp(number(1))
        return ddp.module.weight.item()

    assert on_ranks(run, 2) == [weight().weight.item()] * 2


def test_a_change_inside_a_round_is_refused() -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(weight(), transport)
        ddp(number(1))
        with pytest.raises(UsageError, match="inside a round"):
            ddp.set_algorithm("shift_one")

    on_ranks(run, 2)


def test_phases_can_be_rolled_back() -> None:
    def run(transport: Transport) -> list[str]:
        algorithm = Phased(GradientAllReduceAlgorithm(), 2, then=LocalSGDAlgorithm(3))
        ddp = DDP(weight(), transport, algorithm=algorithm)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        saved = ddp.algorithm_state_dict()
        seen = []
        for step in range(5):
            if step == 3:
                ddp.load_algorithm_state_dict(saved)
            backward(ddp, 1)
            optimizer.step()
            seen.append(type(ddp.algorithm.running).__name__.removesuffix("AlgorithmImpl"))
        return seen

    assert on_ranks(run, 2) == [["GradientAllReduce"] * 2 + ["LocalSGD"] + ["GradientAllReduce"] * 2] * 2


def test_the_state_of_another_algorithm_is_refused() -> None:
    def run(transport: Transport) -> None:
        state = DDP(weight(), transport, algorithm="local_sgd").algorithm_state_dict()
        ddp = DDP(weight(), transport, algorithm="shift_one")
        with pytest.raises(ConfigError, match="LocalSGDAlgorithmImpl, and DecentralizedAlgorithmImpl is running"):
            ddp.load_algorithm_state_dict(state)

    on_ranks(run, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DDP(weight(), InProcessTransport.create_group(1)[0], algorithm=LocalSGDAlgorithm),
        lambda: Phased("local_sgd", 3, then=LocalSGDAlgorithm(2)),
        lambda: GradientAllReduceAlgorithm(compressor=torch.bfloat16),
    ],
    ids=["class", "name", "dtype"],
)
def test_what_is_no_object_of_its_kind_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no (Algorithm|Compressor)"):
        make()


def test_a_sum_thrown_away_with_a_skipped_step_does_not_count() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport, algorithm=GradientAllReduceAlgorithm(average=False))
        for _ in range(2):  # no step in between, as when GradScaler skips one
            ddp.zero_grad()
            backward(ddp, 1)
        return ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [2.0, 2.0]


def test_a_refused_wrapper_can_be_tried_again_while_its_error_is_held() -> None:
    def run(transport: Transport) -> str:
        model = weight()
        optimizer = QAdamOptimizer([torch.zeros(1, requires_grad=True)])
        with pytest.raises(ConfigError) as refusal:
            DDP(model, transport, algorithm=QAdamAlgorithm(optimizer))
        DDP(model, transport).close()
        return str(refusal.value)

    assert all("does not hold parameter 'weight'" in each for each in on_ranks(run, 2))
