"""The life of a wrapper: state dicts, copies, taking it apart, and what is left when it is gone."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import time

import pytest
import torch
from torch import nn

from ddp.models import WEIGHT_ALGORITHMS, Heads, all_equal, backward, fill, number, on_ranks, values, weight
from murmura import (
    DDP,
    AggregateGradients,
    AlgorithmImpl,
    InProcessTransport,
    LocalAggregator,
    MurmuraError,
    PeerTimeout,
    Transport,
    TransportClosed,
    UsageError,
    run_world,
)
from murmura.algorithms import Algorithm
from murmura.buckets import Bucket
from worlds import SECONDS


def communication_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("murmura-")}


# State dicts


def test_the_state_dict_has_no_prefix_and_loads_with_and_without_the_wrapper() -> None:
    def run(transport: Transport) -> None:
        model = fill(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), seed=1)
        ddp = DDP(model, transport)
        state = ddp.state_dict()
        assert state.keys() == model.state_dict().keys()
        fresh = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        fresh.load_state_dict(state)
        assert all_equal([fresh.state_dict(), model.state_dict()])

        other = {name: torch.full_like(value, 7) for name, value in state.items()}
        before = list(model.parameters())
        assert not ddp.load_state_dict(other).missing_keys
        assert all_equal([dict(model.state_dict()), other])
        assert all(one is two for one, two in zip(model.parameters(), before, strict=True))

    on_ranks(run, 2)


def test_a_state_dict_with_the_prefix_of_torchs_wrapper_loads_too() -> None:
    ddp = DDP(weight())
    ddp.load_state_dict({"module.weight": torch.full((1, 1), 5.0)})
    assert ddp.module.weight.item() == 5.0
    with pytest.raises(RuntimeError, match="Missing key"):
        ddp.load_state_dict({"elsewhere": torch.zeros(1)})
    assert ddp.load_state_dict({}, strict=False).missing_keys == ["weight"]
    ddp.close()


def test_a_module_that_has_a_part_called_module_is_not_mistaken() -> None:
    ddp = DDP(nn.ModuleDict({"module": weight(1.0)}))
    ddp.load_state_dict({"module.weight": torch.full((1, 1), 5.0)})
    assert ddp.module["module"].weight.item() == 5.0
    ddp.load_state_dict({"module.module.weight": torch.full((1, 1), 6.0)})
    assert ddp.module["module"].weight.item() == 6.0
    ddp.close()


def test_assign_would_replace_the_parameters_and_is_refused() -> None:
    ddp = DDP(weight())
    with pytest.raises(UsageError, match="assign"):
        ddp.load_state_dict({"weight": torch.zeros(1, 1)}, assign=True)
    ddp.close()


def test_the_state_dict_survives_torch_save() -> None:
    ddp = DDP(fill(Heads(), seed=3))
    ddp(values(2, 4, seed=0), use=[0]).sum().backward()
    file = io.BytesIO()
    torch.save(ddp.state_dict(), file)
    file.seek(0)
    assert all_equal([dict(torch.load(file)), dict(fill(Heads(), seed=3).state_dict())])
    ddp.close()


# Copies


def test_a_wrapper_can_neither_be_copied_nor_pickled() -> None:
    ddp = DDP(weight())
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(UsageError, match=r"cannot be (copied|pickled)"):
            attempt(ddp)
    with pytest.raises(UsageError, match=r"copy.deepcopy\(ddp.module\)"):
        copy.deepcopy(ddp)
    with pytest.raises(UsageError, match=r"ddp.state_dict\(\)"):
        pickle.dumps(ddp)
    ddp.close()


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
def test_a_copy_of_the_module_is_free_and_leaves_the_original_alone(duplicate) -> None:  # type: ignore[no-untyped-def]
    """Rank 1 alone trains its copy, as one does with an average of weights: nobody waits for it."""

    def run(transport: Transport) -> tuple[float, float, float | None, int]:
        ddp = DDP(weight(2.0), transport)
        backward(ddp, transport.rank)
        twin = duplicate(ddp.module)
        gradient = None
        if transport.rank == 1:
            twin.zero_grad()
            backward(twin, 100)
            gradient = twin.weight.grad.item()
            with torch.no_grad():
                twin.weight.fill_(50)
        backward(ddp, transport.rank)
        return ddp.module.weight.item(), ddp.module.weight.grad.item(), gradient, ddp.algorithm_state_dict()["round"]

    assert on_ranks(run, 2) == [(2.0, 1.0, None, 2), (2.0, 1.0, 100.0, 2)]


def test_a_copy_can_be_wrapped_itself() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport)
        twin = DDP(copy.deepcopy(ddp.module), transport)
        backward(ddp, transport.rank)
        backward(twin, 2 * transport.rank)
        return [each.module.weight.grad.item() for each in (ddp, twin)]

    assert on_ranks(run, 2) == [[0.5, 1.0]] * 2


def test_the_averages_of_torchs_swa_utils_work() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(2.0), transport)
        average = torch.optim.swa_utils.AveragedModel(ddp.module)
        with torch.no_grad():
            ddp.module.weight.fill_(4.0)
        average.update_parameters(ddp.module)
        return average(number(1)).item()

    assert on_ranks(run, 2) == [4.0, 4.0]


# Taking apart


def backward_through(model: nn.Module, value: float) -> None:
    model(torch.full((1, 4), float(value)), use=[0]).sum().backward()


def hooks_of(model: nn.Module) -> dict[tuple[str, str], object]:
    """Every dictionary of hooks on the model and its parts, as a copy."""
    return {
        (name, attribute): dict(value)
        for name, part in model.named_modules()
        for attribute, value in vars(part).items()
        if "hooks" in attribute and isinstance(value, dict)
    }


def test_into_inner_leaves_no_hook_and_gradients_stay_usable() -> None:
    def run(transport: Transport) -> None:
        model = Heads(num_heads=1)
        before = hooks_of(model)
        ddp = DDP(model, transport)
        assert hooks_of(model) != before
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        backward_through(ddp, transport.rank)
        gradient = model.trunk.weight.grad
        assert torch.equal(gradient, torch.full((4, 4), 0.5))

        assert ddp.into_inner() is model
        assert hooks_of(model) == before
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        assert model.trunk.weight.grad is gradient
        assert torch.equal(gradient, torch.full((4, 4), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        if transport.rank == 0:  # alone: nothing is exchanged any more
            backward_through(model, 3)
            assert torch.equal(model.trunk.weight.grad, torch.full((4, 4), 3.0))
        transport.barrier()

    on_ranks(run, 2)


def test_close_may_be_called_again_even_when_another_wrapper_has_the_module() -> None:
    class Impl(AlgorithmImpl):
        num_steps = 0

        def on_bucket_ready(self, bucket: Bucket) -> None:
            self.process_group.all_reduce(bucket.flat, "mean")

        def after_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.num_steps += 1

    class Choice(Algorithm):
        impl = Impl

    def run(transport: Transport) -> tuple[float, int]:
        model = weight()
        first = DDP(model, transport)
        first.close()
        first.close()
        second = DDP(model, transport, algorithm=Choice())
        first.close()
        with pytest.raises(UsageError, match="already wrapped"):
            DDP(nn.Sequential(model), transport)
        backward(second, transport.rank)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return model.weight.item(), second.algorithm.num_steps

    assert on_ranks(run, 2) == [(0.5, 1)] * 2


def test_a_closed_wrapper_refuses_to_train_and_leaves_a_plain_module() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport)
        ddp.close()
        for train in (lambda: backward(ddp, 1), ddp.sync_gradients, lambda: ddp.set_algorithm("bytegrad")):
            with pytest.raises(UsageError, match=r"after close\(\): the replicas are no longer kept together"):
                train()
        with torch.no_grad():
            ddp(number(1))  # to evaluate is no training
        backward(ddp.module, transport.rank)
        with pytest.raises(TransportClosed):
            ddp.verify_in_sync()
        return ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [0.0, 1.0]


def test_closing_the_wrapper_leaves_a_given_transport_open() -> None:
    def run(transport: Transport) -> float:
        DDP(weight(), transport).close()
        return transport.all_reduce(torch.ones(1)).item()

    assert on_ranks(run, 2) == [2.0, 2.0]


def test_closing_the_wrapper_closes_a_transport_of_its_own() -> None:
    ddp = DDP(weight())
    transport = ddp.transport
    ddp.close()
    with pytest.raises(TransportClosed):
        transport.barrier()


# Left alone


def await_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    """The communication threads that are still there after a while."""
    deadline = time.monotonic() + 5
    while left := communication_threads() - before:
        if time.monotonic() > deadline:
            return left
        gc.collect()
        time.sleep(0.01)
    return set()


def test_a_dropped_wrapper_leaves_no_thread_and_a_plain_module() -> None:
    def run(transport: Transport) -> float:
        model = weight()
        ddp = DDP(model, transport)
        backward(ddp, transport.rank)
        assert model.weight.grad.item() == 0.5
        del ddp
        gc.collect()
        model.zero_grad()
        backward(model, transport.rank)
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return model.weight.grad.item()

    before = communication_threads()
    assert on_ranks(run, 2) == [0.0, 1.0]
    assert not await_threads(before)


def test_a_dropped_wrapper_ends_its_thread_while_the_transport_lives() -> None:
    before = communication_threads()
    (transport,) = InProcessTransport.create_group(1)
    ddp = DDP(weight(), transport, algorithm=AggregateGradients(LocalAggregator()))  # has work in a world of one too
    backward(ddp, 1)
    assert len(communication_threads() - before) == 1
    del ddp
    assert not await_threads(before)
    transport.close()


def test_a_wrapper_dropped_with_a_graph_alive_does_no_harm() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport)
        out = ddp(number(transport.rank))
        model = ddp.module
        del ddp
        gc.collect()
        out.sum().backward()
        return model.weight.grad.item()

    assert on_ranks(run, 2) == [0.0, 1.0]


def fail_in_a_round(transport: Transport) -> list[str]:
    """In a process of its own, because what is left behind would be held against the next test."""
    before = communication_threads()

    def fail(inner: Transport) -> None:
        ddp = DDP(weight(), inner)
        for _ in range(3 + inner.rank):
            backward(ddp, 1)
        ddp.verify_in_sync()

    with pytest.raises(MurmuraError):
        on_ranks(fail, 2)
    return [thread.name for thread in await_threads(before)]


def test_a_failed_world_leaves_no_thread() -> None:
    """Nor the models that the errors' tracebacks lead to."""
    assert run_world(fail_in_a_round, 1, kind="processes", timeout=SECONDS) == [[]]


# Exchanges that fail when their results are in use, as on a GPU


@pytest.mark.parametrize(
    ("algorithm", "fails_later"),
    [("decentralized", True), ("shift_one", True), ("async", True), ("streaming_diloco", True), ("async", False)],
)
def test_after_a_late_failure_on_an_algorithms_channel_weights_are_neither_used_nor_saved(
    algorithm: str, fails_later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcessTransport, "fails_later", fails_later)
    (transport,) = InProcessTransport.create_group(1)
    ddp = DDP(weight(), transport, algorithm=WEIGHT_ALGORITHMS[algorithm])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    backward(ddp, 1)
    optimizer.step()
    channel = ddp.algorithm._channel
    assert channel is not ddp._replica.transport
    channel.abort(PeerTimeout("rank 1 did not come"))
    for act in (optimizer.step, ddp.algorithm_state_dict, lambda: ddp(number(1))):
        with pytest.raises(PeerTimeout, match="rank 1 did not come") if fails_later else contextlib.nullcontext():
            act()
    ddp.close()
    transport.close()
