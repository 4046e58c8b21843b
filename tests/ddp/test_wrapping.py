"""Wrapping a model: what every rank starts from, and what is refused."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp.models import Heads, all_equal, backward, errors_on, fill, number, on_ranks, weight, weights_of
from murmura import (
    DDP,
    ConfigError,
    GradientAllReduceAlgorithm,
    GradientAllReduceAlgorithmImpl,
    InProcessTransport,
    ReplicaDivergence,
    Transport,
    UsageError,
    run_world,
)
from worlds import SECONDS


def small(seed: int) -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), seed)


def test_every_rank_starts_from_the_parameters_and_buffers_of_rank_0() -> None:
    def wrap(transport: Transport) -> list[torch.Tensor]:
        model = small(transport.rank)
        model[1].running_mean.fill_(transport.rank + 5)
        model[1].num_batches_tracked.fill_(transport.rank + 7)
        ddp = DDP(model, transport)
        return [weights_of(ddp.module), model[1].running_mean.clone(), model[1].num_batches_tracked.clone()]

    results = on_ranks(wrap, 3)
    assert all_equal(results)
    assert torch.equal(results[2][0], weights_of(small(0)))
    assert results[2][1].tolist() == [5.0] * 4
    assert results[2][2].item() == 7


def test_an_optimizer_built_before_stays_valid() -> None:
    def train(transport: Transport) -> tuple[bool, float]:
        model = weight(10.0 * (transport.rank + 1))
        before = model.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ddp = DDP(model, transport)
        backward(ddp, transport.rank)
        optimizer.step()
        return model.weight is before, model.weight.item()

    assert on_ranks(train, 3) == [(True, 9.0)] * 3


def test_broadcast_parameters_takes_over_any_rank_in_place() -> None:
    def broadcast(transport: Transport) -> tuple[float, float, bool]:
        model = nn.Sequential(weight(), nn.BatchNorm1d(1))
        ddp = DDP(model, transport)
        with torch.no_grad():
            model[0].weight.fill_(transport.rank)
            model[1].running_mean.fill_(transport.rank)
        parameter = model[0].weight
        ddp.broadcast_parameters(2)
        return model[0].weight.item(), model[1].running_mean.item(), model[0].weight is parameter

    assert on_ranks(broadcast, 3) == [(2.0, 2.0, True)] * 3


def test_the_wrapper_shows_what_it_was_made_of() -> None:
    def look(transport: Transport) -> None:
        model = weight()
        ddp = DDP(model, transport)
        assert ddp.module is model
        assert ddp.transport is transport
        assert ddp.backend is transport
        assert isinstance(ddp.algorithm, GradientAllReduceAlgorithmImpl)
        assert dict(ddp.named_parameters()).keys() == {"module.weight"}
        assert ddp.train().module.training
        assert not ddp.eval().module.training

    on_ranks(look, 2)


def test_the_wrapper_passes_arguments_and_results_through() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = weight(3.0)

        def forward(self, x: torch.Tensor, *, times: int, label: str = "") -> dict[str, object]:
            return {"out": (self.inner(x) * times,), "label": label}

    def call(transport: Transport) -> tuple[float, object, float]:
        ddp = DDP(Picky(), transport)
        result = ddp(number(transport.rank), times=2, label="x")
        result["out"][0].sum().backward()
        return result["out"][0].item(), result["label"], ddp.module.inner.weight.grad.item()

    assert on_ranks(call, 2) == [(0.0, "x", 1.0), (6.0, "x", 1.0)]


def test_a_world_of_one_needs_no_transport() -> None:
    ddp = DDP(weight())
    assert ddp.transport.world_size == 1
    backward(ddp, 4.0)
    assert ddp.module.weight.grad.item() == 4.0
    ddp.verify_in_sync()
    assert ddp.consensus_distance() == 0.0
    ddp.close()


def test_with_bucket_size() -> None:
    def count(transport: Transport) -> tuple[int, int]:
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
        small_buckets = DDP.with_bucket_size(model, transport, 64)
        num_small = len(small_buckets._replica.buckets)
        small_buckets.into_inner()
        return num_small, len(DDP.with_bucket_size(model, transport, 2**20)._replica.buckets)

    assert on_ranks(count, 2) == [(4, 1)] * 2


def test_models_without_trainable_parameters_can_be_wrapped() -> None:
    def wrap(transport: Transport) -> list[torch.Tensor]:
        ddp = DDP(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2, affine=False)), transport)
        frozen = DDP(weight(float(transport.rank + 1)).requires_grad_(False), transport)
        return [ddp(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), frozen(number(5)).detach()]

    for out, product in on_ranks(wrap, 2):
        assert out.shape == (2, 2)
        assert product.item() == 5.0


def test_empty_parameters_are_no_trouble() -> None:
    def train(transport: Transport) -> list[float]:
        model = nn.ParameterDict({"none": torch.zeros(0), "one": torch.zeros(1)})
        ddp = DDP(model, transport)
        (model["one"] * (transport.rank + 1.0)).sum().backward()
        ddp.verify_in_sync()
        return model["one"].grad.tolist()

    assert on_ranks(train, 2) == [[1.5], [1.5]]


# ignore


def test_ignored_parameters_and_buffers_stay_local() -> None:
    def train(transport: Transport) -> tuple[float, ...]:
        model = nn.ModuleDict({"shared": weight(transport.rank), "own": weight(transport.rank)})
        model.register_buffer("counter", torch.full((1,), float(transport.rank)))
        model.register_buffer("common", torch.full((1,), float(transport.rank)))
        ddp = DDP(model, transport, ignore=["own.weight", "counter"])
        x = number(transport.rank + 1)
        (model["shared"](x) + model["own"](x)).sum().backward()
        ddp.verify_in_sync()
        return (
            model["shared"].weight.item(),
            model["own"].weight.item(),
            model.counter.item(),
            model.common.item(),
            model["shared"].weight.grad.item(),
            model["own"].weight.grad.item(),
        )

    assert on_ranks(train, 2) == [(0, 0, 0, 0, 1.5, 1), (0, 1, 1, 0, 1.5, 2)]


def test_models_that_differ_only_in_what_is_ignored_are_the_same() -> None:
    def wrap(transport: Transport) -> None:
        DDP(
            nn.ModuleDict({"a": weight(), "b": nn.Linear(1, transport.rank + 1)}),
            transport,
            ignore=("b.weight", "b.bias"),
        )

    on_ranks(wrap, 2)


def test_an_unknown_name_in_ignore_is_refused() -> None:
    for error in errors_on(lambda transport: DDP(weight(), transport, ignore=["weight", "wait", "bias"]), 2):
        assert isinstance(error, ConfigError)
        assert "'bias', 'wait'" in str(error)
        assert "'weight'" not in str(error)


# Refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_size_bytes": 0}, "bucket_size_bytes=0"),
        ({"verify_every": -1}, "verify_every=-1"),
        ({"nonfinite": "explode"}, "nonfinite='explode'"),
        ({"algorithm": "nope"}, "algorithm='nope' is unknown. Known: .*'gradient_allreduce'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DDP(weight(), **options)


def test_the_known_nonfinite_choices_are_listed() -> None:
    with pytest.raises(ConfigError, match="'pass', 'raise', 'skip_step'"):
        DDP(weight(), nonfinite="explode")


def test_an_algorithm_can_come_by_name_or_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with_name = DDP(weight(), algorithm="gradient_allreduce")
    assert isinstance(with_name.algorithm, GradientAllReduceAlgorithmImpl)
    with_name.close()
    with monkeypatch.context() as patched:
        patched.setenv("MURMURA_ALGORITHM", "gradient_allreduce")
        DDP(weight()).close()
        patched.setenv("MURMURA_ALGORITHM", "nope")
        with pytest.raises(ConfigError, match="'nope' is unknown"):
            DDP(weight())
        DDP(weight(), algorithm=GradientAllReduceAlgorithm()).close()  # what is given comes first


def test_wrapping_twice_is_refused() -> None:
    def wrap_twice(transport: Transport) -> list[str]:
        model = nn.Sequential(weight(), weight())
        ddp = DDP(model, transport)
        refusals = []
        for again in (ddp, nn.Sequential(ddp), model[1], nn.Sequential(nn.ReLU(), model[0])):
            with pytest.raises(UsageError, match=r"already wrapped .*into_inner") as refusal:
                DDP(again, transport)
            refusals.append(str(refusal.value))
        ddp.into_inner()
        DDP(model, transport)  # now it is free
        return refusals

    on_ranks(wrap_twice, 2)


def test_wrapping_the_same_module_again_closes_the_older_wrapper() -> None:
    """As when a notebook's cell is run again while the name of the first wrapper still holds it."""
    (transport,) = InProcessTransport.create_group(1)
    model = weight()
    first = DDP(model, transport)
    with pytest.warns(UserWarning, match="still wrapped by an older DDP, which is closed now"):
        second = DDP(model, transport)
    with closing(second):
        backward(second, 3)
    assert model.weight.grad.item() == 3
    with pytest.raises(UsageError, match=r"after close\(\)"):
        backward(first, 1)


def test_torch_ddp_inside_is_refused() -> None:
    """torch's own wrapper needs a process group even to be built, so an empty one of its class stands for it."""
    inner = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(inner)
    inner.module = weight()
    with pytest.raises(UsageError, match=r"already wrapped by torch's DistributedDataParallel"):
        DDP(nn.Sequential(inner), InProcessTransport.create_group(1)[0])


def test_a_dropped_wrapper_holds_no_claim() -> None:
    def wrap_again(transport: Transport) -> float:
        model = weight()
        DDP(model, transport)
        ddp = DDP(model, transport)
        backward(ddp, transport.rank)
        return model.weight.grad.item()

    assert on_ranks(wrap_again, 2) == [0.5, 0.5]


def different(transport: Transport, difference: str) -> None:
    odd = transport.rank == 1
    model = nn.ModuleDict({"first": nn.Linear(2, 3), "second": nn.Linear(3, 3)})
    if odd:
        match difference:
            case "shape":
                model["second"] = nn.Linear(4, 3)
            case "transposed":
                model["first"] = nn.Linear(3, 2)
            case "name":
                model["third"] = model.pop("second")
            case "dtype":
                model["second"].to(torch.float64)
            case "number":
                model["third"] = nn.Linear(1, 1)
            case "fewer":
                del model["second"]
            case "frozen":
                model["second"].weight.requires_grad_(False)
            case "buffer":
                model.register_buffer("extra", torch.zeros(3))
    DDP(model, transport)


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ("shape", "rank 0: second.weight: [3, 3] torch.float32\n  rank 1: second.weight: [3, 4] torch.float32"),
        ("transposed", "rank 0: first.weight: [3, 2] torch.float32\n  rank 1: first.weight: [2, 3] torch.float32"),
        ("name", "rank 0: second.weight: [3, 3] torch.float32\n  rank 1: third.weight: [3, 3] torch.float32"),
        ("dtype", "rank 0: second.weight: [3, 3] torch.float32\n  rank 1: second.weight: [3, 3] torch.float64"),
        ("number", "rank 0: (nothing)\n  rank 1: third.weight: [1, 1] torch.float32"),
        ("fewer", "rank 0: second.weight: [3, 3] torch.float32\n  rank 1: (nothing)"),
        (
            "frozen",
            "rank 0: second.weight: [3, 3] torch.float32\n  rank 1: second.weight: [3, 3] torch.float32, frozen",
        ),
        ("buffer", "rank 0: (nothing)\n  rank 1: extra: [3] torch.float32, buffer"),
    ],
)
def test_models_that_differ_between_ranks_are_refused_on_every_rank(difference: str, words: str) -> None:
    for error in errors_on(different, 3, difference):
        assert isinstance(error, ReplicaDivergence)
        assert words in str(error)
        assert "Build the same model on every rank" in str(error)


def test_a_refused_wrapper_leaves_no_hook() -> None:
    def refuse(transport: Transport) -> None:
        model = Heads()
        with pytest.raises(ConfigError, match="verify_every=1 would find replicas that differ"):
            DDP(model, transport, algorithm="shift_one", verify_every=1)
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        DDP(model, transport)

    on_ranks(refuse, 2)


def refused(transport: Transport) -> list[str]:
    """What is said about each difference, in one world: a refusal leaves the transport usable."""
    said = []
    for difference in ("shape", "number"):
        with pytest.raises(ReplicaDivergence) as refusal:
            different(transport, difference)
        said.append(str(refusal.value))
    ddp = DDP(weight(), transport)
    backward(ddp, transport.rank)
    return [*said, str(ddp.module.weight.grad.item())]


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_models_that_differ_between_processes_are_refused_and_the_transport_goes_on(transport: str) -> None:
    for shape, number_of, gradient in run_world(refused, 2, kind="processes", transport=transport, timeout=SECONDS):
        assert "rank 0: second.weight: [3, 3] torch.float32\n  rank 1: second.weight: [3, 4] torch.float32" in shape
        assert "rank 0: (nothing)\n  rank 1: third.weight: [1, 1] torch.float32" in number_of
        assert gradient == "0.5"
