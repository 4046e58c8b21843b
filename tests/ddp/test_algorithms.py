"""Algorithms in the wrapper: chosen, exchanged, written by a user; the wrapper does not change for them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp.models import Heads, all_equal, backward, errors_on, fill, number, on_ranks, values, weight, weights_of
from murmura import (
    DDP,
    Algorithm,
    AlgorithmImpl,
    ConfigError,
    GradientAllReduceAlgorithm,
    GradientAllReduceAlgorithmImpl,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    Transport,
    UsageError,
)
from murmura.algorithms.base import Replica
from murmura.buckets import Bucket
from murmura.types import Exchanges

# A user's own: a mean of gradients that keeps a diary


class DiaryImpl(AlgorithmImpl):
    def __init__(self, process_group: Transport, factor: float) -> None:
        super().__init__(process_group)
        self.factor = factor
        self.diary: list[str] = []

    def setup(self, replica: Replica) -> None:
        self.replica = replica
        self.diary.append(f"setup of {len(replica.parameters)} parameters in {len(replica.buckets)} buckets")

    def before_forward(self) -> None:
        self.diary.append(f"forward {self.replica.round}")

    def on_bucket_ready(self, bucket: Bucket) -> None:
        self.diary.append(f"bucket {bucket.index}")
        self.process_group.all_reduce(bucket.flat, "mean")
        bucket.flat.mul_(self.factor)

    def after_backward(self) -> None:
        self.diary.append(f"backward {self.replica.round}")

    def before_step(self, optimizer: Optimizer) -> None:
        self.diary.append("before step")

    def after_step(self, optimizer: Optimizer) -> None:
        self.diary.append("after step")

    def close(self) -> None:
        self.diary.append("close")

    def state_dict(self) -> dict[str, Any]:
        return {"diary": list(self.diary)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.diary = list(state["diary"])


@dataclass(frozen=True)
class Diary(Algorithm):
    impl: ClassVar[type[AlgorithmImpl]] = DiaryImpl
    factor: float = 1.0


def test_a_users_own_algorithm_is_told_of_everything_in_order() -> None:
    def run(transport: Transport) -> list[str]:
        ddp = DDP(nn.Sequential(weight(), weight()), transport, algorithm=Diary(), bucket_size_bytes=1)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            with ddp.no_sync():
                backward(ddp, 1)
            backward(ddp, 1)
            optimizer.step()
        with torch.no_grad():
            ddp(number(1))
        ddp.close()
        return ddp.algorithm.diary

    one_round = ["forward {}", "bucket 0", "bucket 1", "backward {}", "before step", "after step"]
    wanted = [f"{line}".format(number) for number in range(2) for line in one_round]
    assert on_ranks(run, 2) == [["setup of 2 parameters in 2 buckets", *wanted, "close"]] * 2


def test_choices_reach_the_running_algorithm() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport, algorithm=Diary(factor=10.0))
        backward(ddp, transport.rank)
        return ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [5.0, 5.0]


def test_a_declaration_serves_several_models() -> None:
    def run(transport: Transport) -> tuple[list[float], bool]:
        algorithm = Diary(factor=2.0)
        wrappers = [DDP(weight(), transport, algorithm=algorithm) for _ in range(2)]
        for index, ddp in enumerate(wrappers):
            backward(ddp, index + 1)
        return [each.module.weight.grad.item() for each in wrappers], wrappers[0].algorithm is wrappers[1].algorithm

    assert on_ranks(run, 2) == [([2.0, 4.0], False)] * 2


def test_only_optimizers_that_hold_a_parameter_are_heard() -> None:
    def run(transport: Transport) -> list[str]:
        one, other = (DDP(weight(), transport, algorithm=Diary()) for _ in range(2))
        backward(one, 1)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
        assert "before step" not in one.algorithm.diary
        torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1).step()
        return [each.algorithm.diary.count("before step") for each in (one, other)]

    assert on_ranks(run, 2) == [[1, 2]] * 2


def test_two_optimizers_of_one_model_are_both_heard() -> None:
    def run(transport: Transport) -> int:
        ddp = DDP(nn.Sequential(weight(), weight()), transport, algorithm=Diary())
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in ddp.module]
        backward(ddp, 1)
        for optimizer in optimizers:
            optimizer.step()
        return ddp.algorithm.diary.count("after step")

    assert on_ranks(run, 2) == [2, 2]


# set_algorithm


def test_set_algorithm_leaves_nothing_of_the_old_one() -> None:
    def run(transport: Transport) -> tuple[list[str], list[float]]:
        ddp = DDP(weight(), transport, algorithm=Diary(factor=10.0))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        old = ddp.algorithm
        seen = []
        for step, algorithm in enumerate([None, "gradient_allreduce", Diary(factor=3.0)]):
            if algorithm is not None:
                ddp.set_algorithm(algorithm)
            optimizer.zero_grad()
            backward(ddp, transport.rank)
            seen.append(ddp.module.weight.grad.item())
            optimizer.step()
            if step == 1:
                assert isinstance(ddp.algorithm, GradientAllReduceAlgorithmImpl)
        assert ddp.algorithm_state_dict()["round"] == 3
        assert ddp.algorithm.diary[1] == "forward 2"  # rounds count on
        return old.diary, seen

    life = ["setup of 1 parameters in 1 buckets", "forward 0", "bucket 0", "backward 0", "before step", "after step"]
    assert on_ranks(run, 2) == [([*life, "close"], [5.0, 0.5, 1.5])] * 2


def test_a_refused_algorithm_leaves_the_old_one_running() -> None:
    def run(transport: Transport) -> tuple[float, list[str]]:
        ddp = DDP(weight(), transport, algorithm=Diary(factor=10.0))
        for refused in ("nope", LowPrecisionDecentralizedAlgorithm()):
            with pytest.raises(ConfigError):
                ddp.set_algorithm(refused)
        backward(ddp, transport.rank)
        return ddp.module.weight.grad.item(), ddp.algorithm.diary

    for gradient, diary in on_ranks(run, 3, hosts=[0, 0, 1]):  # unequal hosts, which low precision cannot weigh
        assert gradient == 10.0
        assert "close" not in diary


def test_set_algorithm_in_the_middle_of_a_round_is_refused() -> None:
    def run(transport: Transport) -> int:
        ddp = DDP(nn.Sequential(weight(), weight()), transport, bucket_size_bytes=1)
        refusals = []

        def switch(parameter: Tensor) -> None:
            with pytest.raises(UsageError, match=r"set_algorithm\(\) was called while") as refusal:
                ddp.set_algorithm(Diary())
            refusals.append(str(refusal.value))

        hook = ddp.module[0].weight.register_post_accumulate_grad_hook(switch)  # after the wrapper's own
        backward(ddp, 1)
        hook.remove()
        return len(refusals)

    assert on_ranks(run, 2) == [1, 1]


def test_an_algorithm_without_a_class_that_runs_it_is_refused() -> None:
    with pytest.raises(UsageError, match="Algorithm names no class that runs it"):
        DDP(weight(), algorithm=Algorithm())


# State


def test_the_state_of_an_algorithm_goes_from_wrapper_to_wrapper() -> None:
    def run(transport: Transport) -> tuple[dict[str, Any], list[str]]:
        ddp = DDP(weight(), transport, algorithm=Diary())
        backward(ddp, 1)
        state = ddp.algorithm_state_dict()
        ddp.into_inner()
        later = DDP(ddp.module, transport, algorithm=Diary())
        later.load_algorithm_state_dict(state)
        backward(later, 1)
        return state, later.algorithm.diary

    life = ["setup of 1 parameters in 1 buckets", "forward 0", "bucket 0", "backward 0"]
    for state, diary in on_ranks(run, 2):
        assert state["round"] == 1
        assert state["plan"]["buckets"] == [["weight"]]
        assert state["algorithm"] == {"diary": life}
        assert diary == [*life, "forward 1", "bucket 0", "backward 1"]


# Sums


def test_sums_instead_of_means() -> None:
    def run(transport: Transport) -> list[float | None]:
        model = nn.ModuleDict({"a": weight(), "b": weight(), "c": weight()})
        ddp = DDP(model, transport, algorithm=GradientAllReduceAlgorithm(average=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            x = number(transport.rank + 1)
            (model["a"](x) + (model["b"](x) if transport.rank else 0)).sum().backward()
            optimizer.step()
        ddp.verify_in_sync()
        return [None if each.weight.grad is None else each.weight.grad.item() for each in model.values()]

    assert on_ranks(run, 3) == [[6.0, 5.0, None]] * 3


def test_sums_refuse_a_second_backward_before_the_step() -> None:
    def run(transport: Transport) -> None:
        with closing(DDP(weight(), transport, algorithm=GradientAllReduceAlgorithm(average=False))) as ddp:
            backward(ddp, 1)
            backward(ddp, 1)

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert "average=False sums gradients" in str(error)


def test_sums_accumulate_inside_no_sync() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport, algorithm=GradientAllReduceAlgorithm(average=False))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        seen = []
        for _ in range(2):
            optimizer.zero_grad()
            with ddp.no_sync():
                backward(ddp, transport.rank)
            backward(ddp, 10 * transport.rank)
            seen.append(ddp.module.weight.grad.item())
            optimizer.step()
        return seen

    assert on_ranks(run, 3) == [[33.0, 33.0]] * 3


# A user's own that exchanges weights


class EveryFewStepsImpl(AlgorithmImpl):
    """Ranks step on their own and average their weights after every `interval`-th round."""

    exchanges = Exchanges.WEIGHTS

    def __init__(self, process_group: Transport, interval: int) -> None:
        super().__init__(process_group)
        self.interval = interval

    def setup(self, replica: Replica) -> None:
        self.replica = replica

    def after_step(self, optimizer: Optimizer) -> None:
        if self.replica.round % self.interval == 0:
            with torch.no_grad():
                for parameter in self.replica.parameters:
                    self.process_group.all_reduce(parameter, "mean")


@dataclass(frozen=True)
class EveryFewSteps(Algorithm):
    impl: ClassVar[type[AlgorithmImpl]] = EveryFewStepsImpl
    interval: int = 2


def test_an_algorithm_that_exchanges_weights_needs_no_change_here() -> None:
    def run(transport: Transport) -> list[tuple[float, float]]:
        ddp = DDP(weight(10.0), transport, algorithm=EveryFewSteps(interval=2))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        seen = []
        for _ in range(4):
            optimizer.zero_grad()
            with ddp.no_sync():
                backward(ddp, transport.rank)
            backward(ddp, transport.rank)
            gradient = ddp.module.weight.grad.item()
            optimizer.step()
            seen.append((gradient, ddp.module.weight.item()))
        return seen

    # Each rank takes 2r from its own weight; every second time the mean of 0, 2 and 4 is what all have lost.
    assert on_ranks(run, 3) == [
        [(2.0 * rank, 10 - 2.0 * rank), (2.0 * rank, 6.0), (2.0 * rank, 6 - 2.0 * rank), (2.0 * rank, 2.0)]
        for rank in range(3)
    ]


def test_weights_may_be_exchanged_whatever_each_rank_uses() -> None:
    def run(transport: Transport) -> tuple[Tensor, float, int]:
        ddp = DDP(fill(Heads()), transport, algorithm=EveryFewSteps(interval=3))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            ddp(values(3, 4, seed=step), use=[(transport.rank + step) % 3]).square().mean().backward()
            ddp.sync_gradients()  # nothing to do
            optimizer.step()
            distance = ddp.consensus_distance()
            assert (distance < 1e-7) == (step % 3 == 2)
        return weights_of(ddp.module), distance, ddp.algorithm_state_dict()["round"]

    results = on_ranks(run, 3)
    assert all_equal(results)
    assert results[0][2] == 6


def test_torch_autograd_grad_is_no_round_for_weights_either() -> None:
    def run(transport: Transport) -> int:
        ddp = DDP(weight(), transport, algorithm=EveryFewSteps())
        x = number(1).requires_grad_()
        torch.autograd.grad(ddp(x).sum(), x)
        backward(ddp, 1)
        return ddp.algorithm_state_dict()["round"]

    assert on_ranks(run, 2) == [1, 1]


def test_a_part_of_the_module_may_be_called_with_weights_too() -> None:
    def run(transport: Transport) -> int:
        ddp = DDP(nn.Sequential(weight(), nn.ReLU()), transport, algorithm=EveryFewSteps())
        ddp.module[0](number(1)).sum().backward()
        return ddp.algorithm_state_dict()["round"]

    assert on_ranks(run, 2) == [1, 1]


def test_from_gradients_to_weights_and_back() -> None:
    def run(transport: Transport) -> list[Tensor]:
        ddp = DDP(fill(Heads()), transport)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        seen = []
        for step in range(12):
            if step == 4:
                ddp.set_algorithm(EveryFewSteps(interval=2))
            elif step == 8:
                ddp.set_algorithm("gradient_allreduce")
            optimizer.zero_grad()
            ddp(values(3, 4, seed=10 * step + transport.rank), use=[0, 1, 2]).square().mean().backward()
            optimizer.step()
            if step % 2:
                seen.append(weights_of(ddp.module))
        ddp.broadcast_parameters()
        ddp.verify_in_sync()
        return seen[:4]

    assert all_equal(on_ranks(run, 2))


# From replicas that differ to replicas that agree


def test_after_a_change_from_weights_to_gradients_replicas_stay_equal() -> None:
    """Their optimizers' moments differed too, and one rank had none yet for a head that only the others used."""

    def run(transport: Transport) -> tuple[Tensor, bool]:
        ddp = DDP(fill(Heads()), transport, algorithm=LocalSGDAlgorithm(100))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
        for step in range(6):
            if step == 3:
                ddp.set_algorithm("gradient_allreduce")
            optimizer.zero_grad()
            use = [0, 1, 2] if step >= 3 or transport.rank else [0, 1]
            ddp(values(4, 4, seed=10 * step + transport.rank), use=use).square().mean().backward()
            optimizer.step()
        ddp.verify_in_sync()
        return weights_of(ddp.module), all(len(optimizer.state[each]) == 3 for each in ddp.parameters())

    ends = on_ranks(run, 3)
    assert all_equal([weights for weights, _ in ends])
    assert all(complete for _, complete in ends)
