"""Where a wrapper and its algorithm could come apart: closures, freezing, eval mode, rolling back, refusals."""

from __future__ import annotations

import inspect
import threading
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ddp.models import WEIGHT_ALGORITHMS, backward, fill, number, on_ranks, values, weight
from murmura import (
    DDP,
    Algorithm,
    AlgorithmImpl,
    AsyncModelAverageAlgorithm,
    ConfigError,
    GradientAllReduceAlgorithm,
    InProcessTransport,
    LocalSGDAlgorithm,
    PeerLost,
    Phased,
    QAdamAlgorithm,
    QAdamOptimizer,
    Transport,
    UsageError,
    run_world,
)
from murmura.algorithms.toolkit import AfterStepImpl, FlatWeights
from murmura.buckets import Bucket


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


@pytest.mark.parametrize("forward", ["train", "eval", "part", "method"])
@pytest.mark.parametrize("name", WEIGHT_ALGORITHMS)
def test_thawed_parameters_take_part_from_the_next_round_on(name: str, forward: str) -> None:
    """A layer that was frozen when the algorithm started is averaged like the others, whatever forward is used."""

    def run(transport: Transport) -> list[float]:
        with closing(DDP(TwoLayers(), transport, algorithm=WEIGHT_ALGORITHMS[name])) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.5)
            ddp.module.train(forward != "eval")
            for step in range(4):
                if step == 1:
                    ddp.module.head.requires_grad_(True)
                optimizer.zero_grad()
                call = {"part": ddp.module.both, "method": ddp.module.encode}.get(forward, ddp)
                call(number(transport.rank + 1)).sum().backward()
                optimizer.step()
            assert ddp.module.head.weight.item() != 1.0
            with ddp.average_parameters():
                mean = ddp.module.head.weight.item()
            return [mean, ddp.module.head.weight.item()]

    first, second = on_ranks(run, 2)
    assert first[0] == second[0] == pytest.approx((first[1] + second[1]) / 2)
    apart = abs(first[1] - second[1])
    alone = abs(alone_after(3, 1) - alone_after(3, 2))
    assert apart < 0.9 * alone


def alone_after(num_steps: int, x: float) -> float:
    """The head's weight, trained by one rank for itself."""
    model = TwoLayers()
    model.head.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(number(x)).sum().backward()
        optimizer.step()
    return float(model.head.weight.item())


class TwoLayers(nn.Module):
    """A body and a head, which is frozen; the loss is their sum, so that gradients are x."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Sum()
        self.head = self.both.head

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.both.body.weight * x + self.both.head.weight * x


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = weight(1.0), weight(1.0).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.head(x)


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


def test_phased_passes_everything_on_to_the_algorithm_of_its_phase() -> None:
    """All that an algorithm declares and is told, also what is added later."""
    own = {"setup", "before_round", "state_dict", "check_state", "load_state_dict", "in_step"}  # in which it does more
    phased: Any = Phased("gradient_allreduce", 1, then="bytegrad").reify(InProcessTransport.create_group(1)[0])
    phased.running = running = SimpleNamespace()
    told: list[tuple[str, ...]] = []
    for name, defined in vars(AlgorithmImpl).items():
        if name.startswith("_") or name in own:
            continue
        if inspect.isfunction(defined):
            arguments = tuple(inspect.signature(defined).parameters)[1:]
            setattr(running, name, lambda *given, name=name: told.append((name, *given)))
            getattr(phased, name)(*arguments)
            assert told[-1:] == [(name, *arguments)]
        else:
            setattr(running, name, name)
            assert getattr(phased, name) == name


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
        lambda: Phased(LocalSGDAlgorithm, 3, then=LocalSGDAlgorithm(2)),
        lambda: GradientAllReduceAlgorithm(compressor=torch.bfloat16),
    ],
    ids=["class", "phase", "dtype"],
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


class BrokenImpl(AlgorithmImpl):
    """Fails on rank 1 before it has exchanged its first bucket."""

    def on_bucket_ready(self, bucket: Bucket) -> None:
        if self.process_group.rank == 1:
            raise ValueError("the compressor broke")
        self.process_group.all_reduce(bucket.flat)


@dataclass(frozen=True)
class Broken(Algorithm):
    impl: ClassVar[type[AlgorithmImpl]] = BrokenImpl


def test_after_a_bucket_failed_nothing_else_of_its_round_is_exchanged() -> None:
    """The peers would take it for the bucket, and call it a mismatch."""
    raised: dict[int, BaseException] = {}
    mismatched = threading.Event()

    def train(transport: Transport) -> None:
        ddp = DDP(nn.Sequential(weight(), weight()), transport, algorithm=Broken(), bucket_size_bytes=1)
        try:
            backward(ddp, 1)
        except BaseException as error:
            raised[transport.rank] = error
            if transport.rank == 0:
                mismatched.set()
            else:
                mismatched.wait(0.5)  # this rank has not left yet: rank 0 goes on waiting
            raise

    with pytest.raises(ValueError, match="the compressor broke"):
        run_world(train, 2, timeout=20.0)
    assert isinstance(raised[0], PeerLost)
    assert raised[0].peer == 1


class UndecidedImpl(AfterStepImpl):
    def use(self, weights: FlatWeights) -> None:
        """Nothing to keep."""

    def is_due(self, number: int) -> bool:
        number % 2 == 0  # type: ignore[return]  # noqa: B015

    def communicate(self) -> None:
        raise AssertionError("it is never due")


@dataclass(frozen=True)
class Undecided(Algorithm):
    impl: ClassVar[type[AlgorithmImpl]] = UndecidedImpl


def test_an_algorithm_that_does_not_say_when_it_is_due_is_refused() -> None:
    (alone,) = InProcessTransport.create_group(1)
    refused = pytest.raises(UsageError, match=r"is_due\(\) of UndecidedImpl returned None")
    with alone, closing(DDP(weight(1.0), alone, algorithm=Undecided())) as ddp, refused:
        backward(ddp, 1.0)
