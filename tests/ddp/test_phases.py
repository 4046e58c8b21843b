"""The phases of a round, driven by the odd loops that people write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp.models import WEIGHT_ALGORITHMS, all_equal, backward, fill, number, on_ranks, values, weight, weights_of
from murmura import (
    DDP,
    DecentralizedAlgorithm,
    GradientAllReduceAlgorithm,
    InProcessTransport,
    LocalSGDAlgorithm,
    Phased,
    ReplicaDivergence,
    Transport,
    UsageError,
)
from murmura.ddp.round import TRANSITIONS, Event, Phase, Round


def test_every_event_that_a_user_causes_is_decided_in_every_phase() -> None:
    for event in (Event.FORWARD, Event.SYNC, Event.SAVE, Event.SWITCH, Event.CLOSE, Event.FAILURE):
        assert set(TRANSITIONS[event]) == set(Phase), event


def test_a_refused_event_leaves_the_phase() -> None:
    state = Round()
    state.apply(Event.GRADIENT)
    with pytest.raises(UsageError, match=r"Call optimizer.step\(\) after backward\(\)"):
        state.apply(Event.STEP)
    assert state.phase is Phase.BACKWARD


# Which backwards synchronise


def gradient_after(transport: Transport, loop: Callable[[DDP, float], None]) -> float:
    with closing(DDP(weight(), transport)) as ddp:
        loop(ddp, float(transport.rank))
        assert ddp.module.weight.grad is not None
        return ddp.module.weight.grad.item()


def forward_inside(ddp: DDP, value: float) -> None:
    with ddp.no_sync():
        out = ddp(number(value))
    out.sum().backward()


def backward_inside(ddp: DDP, value: float) -> None:
    out = ddp(number(value))
    with ddp.no_sync():
        out.sum().backward()


def two_forwards_inside(ddp: DDP, value: float) -> None:
    with ddp.no_sync():
        outs = [ddp(number(value)) for _ in range(2)]
    for out in outs:
        out.sum().backward()


def last_forward_outside(ddp: DDP, value: float) -> None:
    with ddp.no_sync():
        inside = ddp(number(value))
    ddp(number(value))
    inside.sum().backward()


def method_inside(ddp: DDP, value: float) -> None:
    with ddp.no_sync():
        (ddp.module.weight * number(value)).sum().backward()


def method_outside_after_a_local_round(ddp: DDP, value: float) -> None:
    with ddp.no_sync():
        backward(ddp, 0)
    (ddp.module.weight * number(value)).sum().backward()


@pytest.mark.parametrize(
    ("loop", "seen"),
    [
        (forward_inside, [0, 1]),
        (backward_inside, [0.5, 0.5]),
        (two_forwards_inside, [0, 2]),
        (last_forward_outside, [0.5, 0.5]),
        (method_inside, [0, 1]),
        (method_outside_after_a_local_round, [0.5, 0.5]),
    ],
)
def test_the_last_forward_of_the_root_decides_as_in_torch(
    loop: Callable[[DDP, float], None], seen: list[float]
) -> None:
    assert on_ranks(gradient_after, 2, loop) == seen


# Several backwards on live graphs


@pytest.mark.parametrize("loop", ["retain_graph", "forwards, then backwards", "closure"])
@pytest.mark.parametrize("name", WEIGHT_ALGORITHMS)
def test_nothing_is_written_between_backwards_on_live_graphs(name: str, loop: str) -> None:
    def run(transport: Transport) -> Tensor:
        with closing(
            DDP(fill(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))), transport, algorithm=WEIGHT_ALGORITHMS[name])
        ) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.01)

            def backwards(index: int) -> None:
                optimizer.zero_grad()
                inputs = values(2, 4, seed=10 * index + transport.rank)
                if loop == "forwards, then backwards":
                    outs = [ddp(inputs)[:, each] for each in range(3)]
                else:
                    out = ddp(inputs)
                    outs = [out[:, each] for each in range(3)]
                for each in outs:
                    each.sum().backward(retain_graph=True)

            for index in range(3):
                if loop == "closure":
                    optimizer.step(lambda index=index: backwards(index))
                else:
                    backwards(index)
                    optimizer.step()
            with ddp.average_parameters():
                return weights_of(ddp.module)

    means = on_ranks(run, 2)
    assert all_equal([[mean] for mean in means])
    assert torch.isfinite(means[0]).all()


@pytest.mark.parametrize("name", ["decentralized", "shift_one"])
def test_a_closure_gives_what_the_plain_loop_gives(name: str) -> None:
    def run(transport: Transport, closure: bool) -> Tensor:
        with closing(DDP(fill(nn.Linear(4, 1)), transport, algorithm=name)) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1, momentum=0.9)

            def loss() -> Tensor:
                optimizer.zero_grad()
                out = ddp(values(2, 4, seed=transport.rank)).square().mean()
                out.backward()
                return out

            for _ in range(3):
                if closure:
                    optimizer.step(loss)
                else:
                    loss()
                    optimizer.step()
            return weights_of(ddp.module)

    for plain, closed in zip(on_ranks(run, 2, False), on_ranks(run, 2, True), strict=True):
        assert torch.equal(plain, closed)


# Weights that somebody changes


@pytest.mark.parametrize("name", ["decentralized", "shift_one", "gradient_allreduce"])
def test_a_hand_written_update_is_kept(name: str) -> None:
    def run(transport: Transport) -> float:
        with closing(DDP(fill(nn.Linear(4, 1, bias=False)), transport, algorithm=name)) as ddp:
            for _ in range(60):
                ddp.zero_grad()
                loss = ddp(torch.eye(4)).square().mean()
                loss.backward()
                for parameter in ddp.module.parameters():
                    parameter.data -= 0.5 * parameter.grad  # through .data: no version counter tells of it
            return loss.item()

    assert max(on_ranks(run, 2)) < 1e-6


def test_a_perturbation_is_seen_by_the_second_forward() -> None:
    """Sharpness-aware minimisation: forward, perturb, forward, restore."""

    def run(transport: Transport) -> float:
        with closing(DDP(weight(2.0), transport, algorithm="decentralized")) as ddp:
            backward(ddp, 1)
            ddp.module.weight.data += 0.25
            return ddp(number(1)).item()

    assert on_ranks(run, 2) == [2.25, 2.25]


# Eval mode, parts and methods


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = weight()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        self.count += x.detach().sum()
        return self.layer(x)

    def raw(self, x: Tensor) -> Tensor:
        self.count += x.detach().sum()
        return self.layer.weight * x


CALLS: dict[str, Callable[[DDP], Callable[[Tensor], Tensor]]] = {
    "train": lambda ddp: ddp,
    "eval": lambda ddp: ddp.eval(),
    "method": lambda ddp: ddp.module.encode,
    "raw": lambda ddp: ddp.module.raw,
}


@pytest.mark.parametrize("call", CALLS)
def test_every_forward_verifies(call: str) -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(Parts(), transport, verify_every=2)
        forward = CALLS[call](ddp)
        for index in range(3):
            ddp.zero_grad()
            if index == 2:
                ddp.module.layer.weight.data += transport.rank
            forward(number(1)).sum().backward()

    with pytest.raises(ReplicaDivergence):
        on_ranks(run, 2)


@pytest.mark.parametrize("call", CALLS)
def test_every_forward_keeps_buffers_together(call: str) -> None:
    def run(transport: Transport) -> list[float]:
        with closing(DDP(Parts(), transport)) as ddp:
            forward = CALLS[call](ddp)
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                forward(number(transport.rank + 1)).sum().backward()
                optimizer.step()
            ddp.train()
            ddp(number(0))  # begins a round, so that buffers are those of rank 0
            return ddp.module.count.tolist()

    assert on_ranks(run, 2) == [[3.0], [3.0]]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("first", [LocalSGDAlgorithm(2), GradientAllReduceAlgorithm()])
def test_every_forward_leads_to_the_next_phase_of_phased(call: str, first: Any) -> None:
    then = DecentralizedAlgorithm() if isinstance(first, GradientAllReduceAlgorithm) else GradientAllReduceAlgorithm()

    def run(transport: Transport) -> str:
        with closing(DDP(Parts(), transport, algorithm=Phased(first, 2, then=then))) as ddp:
            forward = CALLS[call](ddp)
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            for _ in range(4):
                optimizer.zero_grad()
                forward(number(transport.rank + 1)).sum().backward()
                optimizer.step()
            return type(ddp.algorithm.running).__name__

    assert on_ranks(run, 2) == [f"{type(then).__name__}Impl"] * 2


# What is refused, and what is none of our business


def test_a_step_inside_backward_is_refused() -> None:
    def run(transport: Transport) -> None:
        with closing(DDP(weight(), transport)) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
            ddp.module.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
            with pytest.raises(UsageError, match=r"stepped while backward was still running"):
                backward(ddp, 1)

    on_ranks(run, 1)


def test_saving_between_micro_batches_is_refused_until_they_are_given_up() -> None:
    def run(transport: Transport) -> int:
        with closing(DDP(weight(), transport)) as ddp:
            with ddp.no_sync():
                backward(ddp, 1)
            with pytest.raises(UsageError, match=r"wait for their exchange, and would lose them"):
                ddp.algorithm_state_dict()
            assert ddp.is_accumulating
            assert ddp.unsettled_algorithm_state_dict()["round"] == 0
            ddp.zero_grad()
            assert not ddp.is_accumulating
            return int(ddp.algorithm_state_dict()["round"])

    assert on_ranks(run, 2) == [0, 0]


def test_function_transforms_pass_the_wrapper_by() -> None:
    def run(transport: Transport) -> tuple[list[float], int]:
        with closing(DDP(fill(nn.Linear(4, 1)), transport)) as ddp:
            for _ in range(2):
                ddp(values(2, 4, seed=0)).sum().backward()
            gradient = torch.func.grad(lambda x: ddp(x).sum())(torch.ones(4))
            return gradient.tolist(), ddp._replica.round

    expected = fill(nn.Linear(4, 1)).weight[0].tolist()
    assert on_ranks(run, 2) == [(expected, 2)] * 2


class Undefined(torch.autograd.Function):
    """Returns no gradient for its second input, which is legal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class WithUndefined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = weight(), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return Undefined.apply(self.layer(x), self.unused)


def test_an_undefined_gradient_is_none() -> None:
    def run(transport: Transport) -> tuple[float, bool]:
        with closing(DDP(WithUndefined(), transport)) as ddp:
            backward(ddp, transport.rank)
            return ddp.module.layer.weight.grad.item(), ddp.module.unused.grad is None

    assert on_ranks(run, 2) == [(0.5, True)] * 2


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # dynamo's own
def test_a_compiled_step_does_not_trace_communication() -> None:
    def run(transport: Transport) -> float:
        with closing(DDP(weight(), transport, algorithm=LocalSGDAlgorithm(1))) as ddp:
            optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.25)
            step = torch.compile(optimizer.step, backend="eager")
            for _ in range(2):
                optimizer.zero_grad()
                backward(ddp, 1)
                step()
            return ddp.module.weight.item()

    assert on_ranks(run, 1) == [0.5]


@pytest.mark.parametrize("around", ["the wrapper", "its module"])
def test_torch_ddp_around_is_refused_in_the_first_forward(around: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with closing(DDP(weight(), InProcessTransport.create_group(1)[0])) as ddp:
            outer = DistributedDataParallel(ddp if around == "the wrapper" else ddp.module)
            with pytest.raises(UsageError, match="torch's DistributedDataParallel wraps a module"):
                outer(number(1))
            del outer  # torch hangs when a wrapper of its own outlives the group
    finally:
        dist.destroy_process_group()


def test_a_copy_of_the_module_is_free_of_the_wrapper() -> None:
    def run(transport: Transport) -> tuple[float, int]:
        with closing(DDP(Parts(), transport)) as ddp:
            teacher = copy.deepcopy(ddp.module)
            teacher.load_state_dict(ddp.module.state_dict())
            teacher(number(transport.rank)).sum().backward()
            return teacher.layer.weight.grad.item(), ddp._replica.round

    assert on_ranks(run, 2) == [(0.0, 0), (1.0, 0)]
