"""What torch offers beside plain loops works as before: compile, autocast, scaling, several optimizers and models."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp.models import (
    all_equal,
    backward,
    fill,
    gradients_of,
    number,
    on_ranks,
    values,
    weight,
    weights_of,
)
from murmura import DDP, DecentralizedAlgorithm, Transport, run_world
from oracles import ddp as oracle
from worlds import SECONDS


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype))


def mlp_loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(values(5, 3, seed=10 * step + rank)).square().mean()


def mean_gradients(num_ranks: int, step: int) -> dict[str, Tensor | None]:
    losses = [lambda model, rank=rank: mlp_loss(model, rank, step) for rank in range(num_ranks)]
    return oracle.mean_gradients(mlp(), losses)


# torch.compile


def compiled(transport: Transport, what: str, backend: str) -> list[dict[str, Tensor | None]]:
    model = mlp()
    called: nn.Module
    match what:
        case "module":
            called = DDP(torch.compile(model, backend=backend), transport, bucket_size_bytes=1)
        case "module in place":
            called = DDP(model, transport, bucket_size_bytes=1)
            model.compile(backend=backend)
        case "wrapper":
            called = torch.compile(DDP(model, transport, bucket_size_bytes=1), backend=backend)
    seen = []
    for step in range(3):
        called.zero_grad()
        mlp_loss(called, transport.rank, step).backward()
        seen.append(gradients_of(model))
    return seen


def check_compiled(results: list[list[dict[str, Tensor | None]]]) -> None:
    assert all_equal(results)
    for step, seen in enumerate(results[0]):
        torch.testing.assert_close(seen, mean_gradients(2, step))


@pytest.mark.parametrize(
    "what", ["wrapper", *[pytest.param(each, marks=pytest.mark.slow) for each in ("module", "module in place")]]
)
def test_compiled_modules(what: str) -> None:
    check_compiled(on_ranks(compiled, 2, what, "aot_eager"))


def train_a_part(transport: Transport, is_compiled: bool) -> list[float]:
    """Train a part that is called by itself; no rank makes its second step."""
    model = nn.ModuleDict({"part": weight(), "other": weight()})
    with closing(DDP(model, transport, algorithm=DecentralizedAlgorithm())) as ddp:
        part = ddp.module["part"]
        called = torch.compile(part, backend="eager") if is_compiled else part
        optimizer = torch.optim.SGD(part.parameters(), lr=0.125)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            called(number(step + 8 * transport.rank)).square().sum().backward()  # its gradient tells the weight
            seen.append(part.weight.grad.item())
            if step != 1:
                optimizer.step()
    return seen


def test_a_compiled_part_sees_the_weights_of_a_round_whose_step_was_skipped() -> None:
    assert on_ranks(train_a_part, 2, True) == on_ranks(train_a_part, 2, False)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_parts_of_a_compiled_model_stay_in_one_graph(fullgraph: bool) -> None:
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def run(transport: Transport) -> None:
        model = mlp()
        with closing(DDP(model, transport, algorithm=DecentralizedAlgorithm())) as ddp:
            model.forward = torch.compile(model.forward, backend=backend, fullgraph=fullgraph)  # type: ignore[method-assign]
            for step in range(3):
                mlp_loss(ddp, transport.rank, step).backward()
            model.forward = None  # type: ignore[assignment]

    on_ranks(run, 1)
    assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["module", "module in place", "wrapper"])
def test_compiled_modules_to_machine_code(what: str) -> None:
    check_compiled(run_world(compiled, 2, what, "inductor", kind="processes", timeout=200.0))


# Precision


def test_autocast() -> None:
    def run(transport: Transport) -> list[dict[str, Tensor | None]]:
        ddp = DDP(mlp(), transport)
        seen = []
        for step in range(2):
            ddp.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mlp_loss(ddp, transport.rank, step)
            loss.backward()
            seen.append(gradients_of(ddp.module))
        return seen

    results = on_ranks(run, 2)
    assert all_equal(results)
    for step, seen in enumerate(results[0]):
        assert all(gradient.dtype == torch.float32 for gradient in seen.values())
        torch.testing.assert_close(seen, mean_gradients(2, step), rtol=0.05, atol=0.05)


def test_grad_scaler() -> None:
    """A step that overflows on one rank is skipped on all, and training goes on."""

    def run(transport: Transport) -> list[tuple[float, float]]:
        ddp = DDP(weight(8.0), transport)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            value = float("inf") if step == 1 and transport.rank == 1 else float(transport.rank)
            scaler.scale(ddp(number(value)).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            seen.append((ddp.module.weight.item(), scaler.get_scale()))
        assert ddp.algorithm_state_dict()["round"] == 3  # a skipped step is a round
        return seen

    assert on_ranks(run, 2) == [[(7.5, 4.0), (7.5, 2.0), (7.0, 2.0)]] * 2


# Optimizers and models


def test_several_optimizers() -> None:
    def run(transport: Transport) -> list[Tensor]:
        ddp = DDP(mlp(), transport)
        optimizers = [
            torch.optim.SGD(ddp.module[0].parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(ddp.module[2].parameters(), lr=0.01),
        ]
        seen = []
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            mlp_loss(ddp, transport.rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            seen.append(weights_of(ddp.module))
        return seen

    assert all_equal(on_ranks(run, 3))


def test_lbfgs_evaluates_as_often_as_it_likes() -> None:
    def run(transport: Transport) -> Tensor:
        ddp = DDP(mlp(), transport)
        optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.1, max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = mlp_loss(ddp, transport.rank)
            loss.backward()
            shared = loss.detach().clone()
            transport.all_reduce(shared, "mean")  # or ranks would take different steps
            return shared

        for _ in range(2):
            optimizer.step(closure)
        return weights_of(ddp.module)

    assert all_equal(on_ranks(run, 2))


def test_two_models_trained_alternately() -> None:
    """As a generator and a discriminator are; each has buckets, rounds and an order of its own."""

    def run(transport: Transport) -> tuple[Tensor, Tensor, list[int]]:
        one, other = DDP(mlp(), transport), DDP(fill(nn.Linear(2, 2), 1), transport)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other)]
        for step in range(6):
            x = values(5, 3, seed=10 * step + transport.rank)
            for optimizer in optimizers:
                optimizer.zero_grad()
            if step % 3 == 0:
                other(one(x).detach()).square().mean().backward()
                optimizers[1].step()
            else:
                other(one(x)).square().mean().backward()  # through both
                optimizers[step % 2].step()
        one.verify_in_sync()
        other.verify_in_sync()
        rounds = [each.algorithm_state_dict()["round"] for each in (one, other)]
        return weights_of(one.module), weights_of(other.module), rounds

    results = on_ranks(run, 2)
    assert all_equal(results)
    assert results[0][2] == [4, 6]


def test_wrappers_may_come_in_any_number_and_go_in_any_order() -> None:
    def run(transport: Transport) -> list[float]:
        wrappers = [DDP(weight(), transport) for _ in range(4)]
        for index, ddp in enumerate(wrappers):
            backward(ddp, index + transport.rank)
        for index in (2, 0):
            wrappers.pop(index).close()
        for ddp in wrappers:
            backward(ddp, transport.rank)
        return [ddp.module.weight.grad.item() for ddp in wrappers]

    assert on_ranks(run, 2) == [[2.0, 4.0]] * 2


def test_a_wrapped_part_of_an_unwrapped_model() -> None:
    def run(transport: Transport) -> tuple[float, float]:
        head = weight(2.0)
        body = DDP(weight(3.0), transport)
        head(body(number(transport.rank))).sum().backward()
        return head.weight.grad.item(), body.module.weight.grad.item()

    assert on_ranks(run, 2) == [(0.0, 1.0), (3.0, 1.0)]


def train_in_processes(transport: Transport) -> tuple[Tensor, Tensor]:
    ddp = DDP(mlp(), transport, bucket_size_bytes=1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        mlp_loss(ddp, transport.rank, step).backward()
        optimizer.step()
    model = ddp.into_inner()
    return weights_of(model), torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def test_gradients_in_shared_memory_outlive_the_wrapper() -> None:
    results = run_world(train_in_processes, 2, kind="processes", timeout=SECONDS)
    assert all_equal(results)
    assert all_equal([results[0], on_ranks(train_in_processes, 2)[0]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_over_gloo(dtype: torch.dtype) -> None:
    """Gloo sums in the dtype itself; that must not be taken for a disagreement between ranks."""
    results = run_world(train_half, 3, dtype, kind="processes", transport="gloo", timeout=SECONDS)
    assert all_equal(results)


def train_half(transport: Transport, dtype: torch.dtype) -> Tensor:
    ddp = DDP(weight(dtype=dtype), transport)
    for step in range(130):
        ddp.zero_grad()
        ddp(number(step % 7 + transport.rank, dtype)).sum().backward()
    return ddp.module.weight.grad
