"""Gradients: they come back as the mean over the ranks, in the memory of their bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp.models import (
    Heads,
    Scale,
    all_equal,
    backward,
    errors_on,
    fill,
    gradients_of,
    number,
    on_ranks,
    values,
    weight,
    weights_of,
)
from murmura import DDP, NonFiniteGradient, TracedTransport, Transport, UsageError
from oracles import ddp as oracle


def lies_in(inner: Tensor, outer: Tensor) -> bool:
    begin = outer.data_ptr()
    return begin <= inner.data_ptr() and inner.data_ptr() + inner.nbytes <= begin + outer.nbytes


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
def test_the_mean_is_there_when_backward_returns(num_ranks: int) -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport)
        backward(ddp, transport.rank)
        return ddp.module.weight.grad.item()

    assert on_ranks(run, num_ranks) == [sum(range(num_ranks)) / num_ranks] * num_ranks


@pytest.mark.parametrize("bucket_size_bytes", [1, 100, 25 * 2**20])
def test_the_size_of_buckets_changes_no_value(bucket_size_bytes: int) -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(values(5, 4, seed=rank), use=[0, 1, 2]).square().mean()

    def run(transport: Transport) -> dict[str, Tensor | None]:
        ddp = DDP(fill(Heads()), transport, bucket_size_bytes=bucket_size_bytes)
        for _ in range(3):  # the plan of buckets is revised after the first round
            ddp.zero_grad()
            loss(ddp, transport.rank).backward()
        return gradients_of(ddp.module)

    results = on_ranks(run, 3)
    assert all_equal(results)
    wanted = oracle.mean_gradients(fill(Heads()), [lambda model, rank=rank: loss(model, rank) for rank in range(3)])
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, wanted[name])


def test_gradients_are_views_into_buckets() -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(fill(Heads(), 0), transport, bucket_size_bytes=64)
        for use in ([0, 1, 2], [0, 1, 2], [1]):
            ddp.zero_grad()
            ddp(values(5, 4, seed=transport.rank), use=use).sum().backward()
            where = {name: bucket for bucket in ddp._replica.buckets for name in bucket.names}
            assert len(where) == 8
            for name, parameter in ddp.module.named_parameters():
                if parameter.grad is not None:
                    assert lies_in(parameter.grad, where[name].flat)
                    assert lies_in(parameter.grad, where[name].flat)

    on_ranks(run, 2)


def test_gradients_move_into_the_buckets_of_a_new_plan() -> None:
    """After the first round buckets are planned anew; gradients that accumulate across it must not be lost."""

    class Shuffled(Heads):
        def forward(self, x: Tensor, use: object = ()) -> Tensor:
            return super().forward(x, [2, 0, 1])  # not in the order of definition

    def run(transport: Transport) -> dict[str, Tensor | None]:
        ddp = DDP(fill(Shuffled()), transport, bucket_size_bytes=1)
        first = ddp._replica.buckets
        for _ in range(2):
            ddp(values(5, 4, seed=transport.rank)).sum().backward()
        assert ddp._replica.buckets is not first
        for bucket in ddp._replica.buckets:
            for parameter in bucket.parameters:
                assert lies_in(parameter.grad, bucket.flat)
        return gradients_of(ddp.module)

    results = on_ranks(run, 2)
    assert all_equal(results)
    one_round = oracle.mean_gradients(
        fill(Heads()), [lambda model, rank=rank: model(values(5, 4, seed=rank), [2, 0, 1]).sum() for rank in range(2)]
    )
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, one_round[name] * 2)


class Chain(nn.Sequential):
    """Layers that run in any order."""

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for index in order:
            x = self[index](x)
        return x


def test_buckets_are_planned_anew_from_the_order_that_rank_0_saw() -> None:
    def run(transport: Transport) -> list[list[str]]:
        ddp = DDP(Chain(*(weight() for _ in range(3))), transport, bucket_size_bytes=1)
        plans = [[bucket.names[0] for bucket in ddp._replica.buckets]]
        for _ in range(3):
            ddp(number(1), order=[2, 0, 1] if transport.rank == 0 else [1, 0, 2]).sum().backward()
            plans.append([bucket.names[0] for bucket in ddp._replica.buckets])
        return plans

    reverse, seen = ["2.weight", "1.weight", "0.weight"], ["1.weight", "0.weight", "2.weight"]
    assert on_ranks(run, 3) == [[reverse, seen, seen, seen]] * 3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_kinds_of_zero_grad(set_to_none: bool) -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport)
        seen = []
        for step in range(3):
            ddp.zero_grad(set_to_none=set_to_none)
            backward(ddp, step + transport.rank)
            seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[0.5, 1.5, 2.5]] * 2


def test_without_zero_grad_means_add_up() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport)
        seen = []
        for step in range(3):
            backward(ddp, step + transport.rank)
            seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[0.5, 2.0, 4.5]] * 2


def test_the_user_may_put_another_tensor_in_the_place_of_a_gradient() -> None:
    def run(transport: Transport) -> tuple[float, float, float]:
        ddp = DDP(weight(), transport)
        backward(ddp, transport.rank)
        mine = torch.full((1, 1), 8.0 * transport.rank)
        ddp.module.weight.grad = mine
        backward(ddp, transport.rank)  # adds to what the user put there
        after = ddp.module.weight.grad.item()
        ddp.module.weight.grad = None
        backward(ddp, transport.rank)
        return after, ddp.module.weight.grad.item(), mine.item()

    results = on_ranks(run, 2)
    assert [result[:2] for result in results] == [(4.5, 0.5)] * 2


def test_a_gradient_put_there_before_any_backward_counts() -> None:
    def run(transport: Transport) -> float:
        model = weight()
        model.weight.grad = torch.full((1, 1), 10.0 * transport.rank)
        ddp = DDP(model, transport)
        backward(ddp, transport.rank)
        return model.weight.grad.item()

    assert on_ranks(run, 2) == [5.5, 5.5]


def test_clipping_sees_the_mean_and_acts_alike_on_all_ranks() -> None:
    def run(transport: Transport) -> tuple[float, float]:
        ddp = DDP(weight(), transport)
        backward(ddp, 6.0 * transport.rank)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), max_norm=1.5)
        return norm.item(), ddp.module.weight.grad.item()

    for norm, gradient in on_ranks(run, 2):
        assert norm == 3.0
        assert gradient == pytest.approx(1.5)


def test_few_collectives_for_many_small_parameters() -> None:
    def run(transport: Transport) -> list[int]:
        with TracedTransport(transport) as traced:
            model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(25)))  # 50 parameters under 1 KiB
            ddp = DDP(model, traced)
            counts = [len(traced.operations)]
            for _ in range(3):
                ddp(values(2, 10, seed=0)).sum().backward()
                counts.append(len(traced.operations))
            ddp.close()
        return counts

    for wrapping, *rounds in on_ranks(run, 2):
        assert wrapping < 10
        assert rounds[0] - wrapping == 3  # the order that rank 0 saw is told once
        assert rounds[1] - rounds[0] == rounds[2] - rounds[1] == 2  # a bucket, and the tail of the round


# Kinds of outputs


@dataclasses.dataclass
class Answer:
    logits: Tensor
    extra: dict[str, list[Tensor]]
    note: str = "x"


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = weight()

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.inner(x).detach(), {"deep": [self.inner(x)]})


def test_outputs_may_be_nested() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(Answering(), transport)
        ddp(number(transport.rank)).extra["deep"][0].sum().backward()
        return ddp.module.inner.weight.grad.item()

    assert on_ranks(run, 2) == [0.5, 0.5]


def test_an_output_object_of_any_other_kind_works_too() -> None:
    class Box:
        def __init__(self, inside: Tensor) -> None:
            self.inside = inside

    class Boxing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = weight()

        def forward(self, x: Tensor) -> Box:
            return Box(self.inner(x))

    def run(transport: Transport) -> float:
        ddp = DDP(Boxing(), transport)
        ddp(number(transport.rank)).inside.sum().backward()
        return ddp.module.inner.weight.grad.item()

    assert on_ranks(run, 2) == [0.5, 0.5]


# Kinds of parameters


def test_channels_last_keeps_its_strides() -> None:
    def run(transport: Transport) -> tuple[Tensor, ...]:
        conv = fill(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
        ddp = DDP(conv, transport)
        strides = conv.weight.stride()
        ddp(values(2, 3, 8, 8, seed=transport.rank).to(memory_format=torch.channels_last)).square().mean().backward()
        assert conv.weight.stride() == strides
        assert conv.weight.grad.stride() == strides
        return weights_of(conv), conv.weight.grad.contiguous()

    results = on_ranks(run, 2)
    assert all_equal(results)
    wanted = oracle.mean_gradients(
        fill(nn.Conv2d(3, 4, 3)),
        [lambda model, rank=rank: model(values(2, 3, 8, 8, seed=rank)).square().mean() for rank in range(2)],
    )
    torch.testing.assert_close(results[0][1], wanted["weight"])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters(dtype: torch.dtype) -> None:
    def run(transport: Transport) -> tuple[complex, complex]:
        ddp = DDP(Scale(torch.full((2,), transport.rank + 1j, dtype=dtype)), transport)
        (ddp(torch.full((2,), 2.0 + 4j * transport.rank, dtype=dtype))).real.sum().backward()
        ddp.verify_in_sync()
        return ddp.module.scale[0].item(), ddp.module.scale.grad[1].item()

    # d Re(s x) / d s, in torch's convention, is the conjugate of x.
    assert on_ranks(run, 3) == [(1j, 2 - 4j)] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_half_precision_parameters(dtype: torch.dtype, num_ranks: int) -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(Scale(torch.ones(3, dtype=dtype)), transport)
        seen = []
        for step in range(4):
            ddp.zero_grad()
            ddp(torch.full((3,), float(3 * transport.rank + step), dtype=dtype)).sum().backward()
            seen.append(ddp.module.scale.grad[1].item())
        return seen

    mean = 3 * (num_ranks - 1) / 2
    assert on_ranks(run, num_ranks) == [[mean, mean + 1, mean + 2, mean + 3]] * num_ranks


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ModuleList(
            Scale(torch.ones(4, dtype=dtype))
            for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.complex64, torch.bfloat16)
        )

    def forward(self, value: float) -> Tensor:
        parts = [each(torch.full((4,), value, dtype=each.scale.dtype)) for each in self.scales]
        return sum((torch.view_as_real(part) if part.is_complex() else part).double().sum() for part in parts)


@pytest.mark.parametrize("bucket_size_bytes", [1, 2**20])
def test_mixed_dtypes(bucket_size_bytes: int) -> None:
    def run(transport: Transport) -> list[tuple[torch.dtype, list[float]]]:
        ddp = DDP(Mixed(), transport, bucket_size_bytes=bucket_size_bytes)
        for _ in range(2):
            ddp.zero_grad()
            ddp(float(transport.rank)).backward()
        return [(each.scale.grad.dtype, each.scale.grad.real.tolist()) for each in ddp.module.scales]

    wanted = [(each.scale.dtype, [0.5] * 4) for each in Mixed().scales]
    assert on_ranks(run, 2) == [wanted] * 2


# Sparse


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = weight()
        self.words = nn.Embedding(5, 1, sparse=True)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.words(index))


def test_a_sparse_gradient_is_refused_by_name_on_every_rank() -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(Words(), transport)
        ddp(torch.tensor([1, 2])).sum().backward()

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert "'words.weight' is sparse" in str(error)
        assert "sparse=False" in str(error)


def test_a_sparse_gradient_is_refused_after_no_sync_too() -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(Words(), transport)
        with ddp.no_sync():
            ddp(torch.tensor([1, 2])).sum().backward()
        ddp.sync_gradients()

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert "'words.weight' is sparse" in str(error)


def test_an_ignored_sparse_parameter_stays_sparse() -> None:
    def run(transport: Transport) -> tuple[bool, Tensor]:
        model = Words()
        nn.init.constant_(model.words.weight, 1.0)
        ddp = DDP(model, transport, ignore=["words.weight"])
        ddp(torch.tensor([transport.rank])).sum().backward()
        return model.words.weight.grad.is_sparse, model.head.weight.grad

    results = on_ranks(run, 2)
    assert [sparse for sparse, _ in results] == [True, True]
    assert torch.equal(results[0][1], results[1][1])


# Gradients that are not finite


def train_with_overflow(transport: Transport, nonfinite: str) -> list[object]:
    model = nn.ModuleDict({"first": weight(1.0), "second": weight(2.0)})
    ddp = DDP(model, transport, nonfinite=nonfinite)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    seen: list[object] = []
    for step in range(3):
        optimizer.zero_grad()
        bad = step == 1 and transport.rank == 1
        out = model["first"](number(1)) + model["second"](number(float("inf") if bad else 1))
        out.sum().backward()
        seen.append(None if model["first"].weight.grad is None else model["second"].weight.grad.item())
        optimizer.step()
    ddp.verify_in_sync()
    return [*seen, model["first"].weight.item()]


def test_nonfinite_pass_lets_it_through() -> None:
    for seen in on_ranks(train_with_overflow, 2, "pass"):
        assert seen[:2] == [1.0, float("inf")]


def test_nonfinite_skip_step_leaves_the_step_out_on_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    # w <- w - (1 + w / 2), twice: 1 -> -0.5 -> -1.25
    assert on_ranks(train_with_overflow, 2, "skip_step") == [[1.0, float("inf"), 1.0, -1.25]] * 2
    assert {record.getMessage() for record in caplog.records} == {
        "the step of round 1 is skipped: the gradient of 'second.weight' is not finite"
    }


def test_nonfinite_raise_names_the_parameter_on_every_rank() -> None:
    for rank, error in enumerate(errors_on(train_with_overflow, 2, "raise")):
        assert isinstance(error, NonFiniteGradient)
        assert f"rank {rank}: the gradient of 'second.weight'" in str(error)
        assert "in round 1" in str(error)


def test_after_nonfinite_raise_the_loop_may_go_on() -> None:
    def run(transport: Transport) -> tuple[int, float]:
        ddp = DDP(weight(), transport, nonfinite="raise")
        num_refused = 0
        for value in (1.0, float("nan") if transport.rank == 0 else 1.0, 3.0):
            ddp.zero_grad()
            try:
                backward(ddp, value)
            except NonFiniteGradient:
                num_refused += 1
                if transport.rank == 0:  # no round, so it may be done alone
                    x = number(1).requires_grad_()
                    torch.autograd.grad(ddp(x).sum(), x)
        return num_refused, ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [(1, 3.0)] * 2


def test_after_nonfinite_raise_join_goes_on_with_the_right_weights() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport, nonfinite="raise")
        seen = []
        for value in ddp.join([1.0, float("nan")] if transport.rank == 0 else [2.0, 4.0, 6.0]):
            ddp.zero_grad()
            try:
                backward(ddp, value)
            except NonFiniteGradient:
                continue
            seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[1.5, 6.0]] * 2


# Hooks of the user's on a parameter


def double_in_place(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def double_anew(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 2


@pytest.mark.parametrize("double", [double_in_place, double_anew])
@pytest.mark.parametrize("hooked", ["before wrapping", "after wrapping", "after a round"])
@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("bucket_size_bytes", [1, 2**25])
def test_what_hooks_make_of_a_gradient_is_averaged(
    double: Callable[[nn.Parameter], None], hooked: str, as_views: bool, bucket_size_bytes: int
) -> None:
    """As under torch's DDP, whose own hooks run behind those of a parameter. The gradient is too long to be lucky."""

    def run(transport: Transport) -> list[set[float]]:
        model = nn.Sequential(Scale(torch.zeros(100_000)), Scale(torch.ones(100_000)))

        def hook() -> None:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(double)

        if hooked == "before wrapping":
            hook()
        ddp = DDP(model, transport, bucket_size_bytes=bucket_size_bytes, gradient_as_bucket_view=as_views)
        if hooked == "after wrapping":
            hook()
        seen = []
        for index in range(4):
            ddp.zero_grad(set_to_none=index != 3)
            ddp(torch.full((100_000,), 1.0 + transport.rank)).sum().backward()
            assert model[0].scale.grad is not None
            seen.append(set(model[0].scale.grad.tolist()))
            if hooked == "after a round" and index == 0:
                hook()
        return seen

    first = {1.5} if hooked == "after a round" else {3.0}
    assert on_ranks(run, 2) == [[first, {3.0}, {3.0}, {3.0}]] * 2


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_gradient_that_is_replaced_after_it_was_sent_is_refused(how: str) -> None:
    def run(transport: Transport) -> None:
        model = nn.Sequential(weight(), weight())
        ddp = DDP(model, transport, bucket_size_bytes=1)

        def change(parameter: nn.Parameter) -> None:
            model[1].weight.grad = torch.ones(1, 1) if how == "replaced" else None

        model[0].weight.register_post_accumulate_grad_hook(change)
        backward(ddp, transport.rank)

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert "the gradient of '1.weight' was replaced or removed after it had been sent" in str(error)


def test_a_step_in_a_hook_that_runs_before_the_wrappers_own_is_refused() -> None:
    def run(transport: Transport) -> None:
        model = weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
        backward(DDP(model, transport), transport.rank)

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert "an optimizer stepped while backward was still running" in str(error)


def test_a_graph_that_another_thread_finds_meanwhile_is_not_forgotten() -> None:
    """Two threads copy gradients in: here one with a graph comes between another's reading and writing."""

    def run(transport: Transport) -> bool:
        reducer = DDP(weight(), transport)._driver.reducer

        class FoundNone:
            def meanwhile(self, *_: object) -> bool:
                reducer._has_graphs = True
                return False

            __bool__ = __ror__ = meanwhile

        class Without:
            def copy_in(self, *_: object, **__: object) -> FoundNone:
                return FoundNone()

        reducer._copy_in(Without(), {})
        return reducer._has_graphs

    assert on_ranks(run, 1) == [True]
