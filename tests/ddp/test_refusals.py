"""What a gradient cannot be: refused on every rank, by the name of its parameter, with a way out that works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddp.models import all_equal, backward, errors_on, fill, gradients_of, number, on_ranks, values, weight
from murmura import DDP, Transport, UsageError
from oracles import ddp as oracle


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_model_cast_after_wrapping_is_refused_by_name(accumulated: bool) -> None:
    def run(transport: Transport) -> None:
        ddp = DDP(nn.Sequential(weight()), transport)
        ddp.to(torch.bfloat16)
        loss = ddp(number(1, torch.bfloat16)).sum()
        if accumulated:
            with ddp.no_sync():
                loss.backward()
            ddp.sync_gradients()
        else:
            loss.backward()

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert "the gradient of '0.weight' no longer fits its bucket" in str(error)
        assert "into_inner()" in str(error)


def test_a_cast_model_can_be_wrapped_again() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport)
        backward(ddp, 1)
        model = ddp.into_inner().to(torch.float64)
        ddp = DDP(model, transport)
        ddp.zero_grad()
        ddp(number(transport.rank, torch.float64)).sum().backward()
        assert model.weight.grad.dtype == torch.float64
        return model.weight.grad.item()

    assert on_ranks(run, 2) == [0.5, 0.5]


def replace(model: nn.Module) -> None:
    model[1] = weight()


def add(model: nn.Module) -> None:
    model.append(weight())


def remove(model: nn.Module) -> None:
    del model[1]


@pytest.mark.parametrize(("change", "name"), [(replace, "1.weight"), (add, "2.weight"), (remove, "1.weight")])
def test_other_parameters_than_those_wrapped_are_found_when_verifying(
    change: Callable[[nn.Module], None], name: str
) -> None:
    """The wrapper does not see their gradients, so that they would drift apart."""

    def run(transport: Transport) -> None:
        ddp = DDP(nn.Sequential(weight(), weight()), transport, verify_every=2)
        backward(ddp, 1)
        ddp.verify_in_sync()
        change(ddp.module)
        for _ in range(3):
            backward(ddp, 1)

    for error in errors_on(run, 2):
        assert isinstance(error, UsageError)
        assert f"{name!r} was replaced, added or removed after wrapping" in str(error)


def penalised(model: nn.Module, rank: int) -> Tensor:
    """A loss with the square of the gradient by its inputs, as in gradient penalties."""
    inputs = values(5, 3, seed=rank, dtype=torch.float64).requires_grad_()
    outputs = model(inputs).sum()
    (slope,) = torch.autograd.grad(outputs, inputs, create_graph=True)
    return outputs + slope.square().sum()


def test_a_gradient_penalty_goes_through_torch_autograd_grad() -> None:
    def make() -> nn.Module:
        return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double())

    def run(transport: Transport) -> tuple[dict[str, Tensor | None], int]:
        ddp = DDP(make(), transport, bucket_size_bytes=1)
        penalised(ddp, transport.rank).backward()
        return gradients_of(ddp.module), ddp.algorithm_state_dict()["round"]

    results = on_ranks(run, 2)
    assert all_equal(results)
    gradients, num_rounds = results[0]
    assert num_rounds == 1
    wanted = oracle.mean_gradients(make(), [lambda model, rank=rank: penalised(model, rank) for rank in range(2)])
    torch.testing.assert_close(gradients, wanted, rtol=0, atol=1e-12)
