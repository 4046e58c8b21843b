"""The arguments of torch's DistributedDataParallel: taken, kept anyway, or refused with the reason and a way out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp.models import all_equal, backward, fill, gradients_of, number, on_ranks, values, weight
from murmura import DDP, ConfigError, Transport, UsageError
from murmura.ddp.options import check_options
from murmura.ddp.torch_arguments import moved

NEEDLESS = {
    "find_unused_parameters": True,
    "static_graph": True,
    "check_reduction": True,
    "skip_all_reduce_unused_params": True,
    "batched_grad_copy": True,
    "output_device": None,
    "dim": 0,
    "delay_all_reduce_named_params": None,
}


def mlp() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Linear(2, 2)))


def step(model: nn.Module, rank: int) -> None:
    """A backward that leaves the last layer without a gradient on rank 0."""
    inner = model.module
    x = model(values(5, 3, seed=rank)) if rank else inner[2](inner[1](inner[0](values(5, 3, seed=rank))))
    x.square().sum().backward()


def test_what_is_needless_here_changes_nothing() -> None:
    def run(transport: Transport) -> list[Any]:
        seen = []
        for options in ({}, NEEDLESS):
            ddp = DDP(mlp(), transport, **options)
            step(ddp, transport.rank)
            seen.append(gradients_of(ddp.module))
            ddp.close()
        return seen

    for plain, with_options in on_ranks(run, 2):
        assert all_equal([plain, with_options])


@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_are_views_of_buckets_or_have_their_own_memory(as_views: bool) -> None:
    def run(transport: Transport) -> tuple[float, list[dict[str, Tensor | None]]]:
        ddp = DDP(mlp(), transport, gradient_as_bucket_view=as_views)
        flats: set[int] = set()
        seen = []
        for _ in range(3):  # the second adds to the first, the third begins anew
            step(ddp, transport.rank)
            seen.append(gradients_of(ddp.module))
            flats |= {each.grad.untyped_storage().data_ptr() for each in ddp.parameters()}
            if len(seen) == 2:
                ddp.zero_grad()
        buckets = {bucket.flat.untyped_storage().data_ptr() for bucket in ddp._replica.buckets}
        return len(flats & buckets) / len(flats), seen

    results = on_ranks(run, 2)
    plain = on_ranks(_plain_gradients, 2)
    for (share_of_views, seen), expected in zip(results, plain, strict=True):
        assert share_of_views == as_views
        assert all_equal([seen, expected])


def _plain_gradients(transport: Transport) -> list[dict[str, Tensor | None]]:
    """As above, by hand: local gradients and one all-reduce for each parameter."""
    model = mlp()
    wrapper = nn.Module()
    wrapper.module, wrapper.forward = model, model.forward  # type: ignore[method-assign]
    seen: list[dict[str, Tensor | None]] = []
    for index in range(3):
        step(wrapper, transport.rank)
        for each in model.parameters():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            transport.all_reduce(each.grad, "mean")
        seen.append(gradients_of(model))
        if index == 1:
            model.zero_grad()
    return seen


def test_a_list_in_second_place_is_device_ids(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "murmura"):
        ddp = DDP(weight(), [0])
    assert ddp.device_ids == [0]
    assert "the model is on the CPU" in caplog.text
    backward(ddp, 2)
    assert ddp.module.weight.grad.item() == 2
    ddp.close()


def test_inputs_are_moved_as_torchs_wrapper_moves_them() -> None:
    class Pair(tuple):
        _fields = ("a", "b")

        def __new__(cls, a: Any, b: Any) -> Pair:
            return super().__new__(cls, (a, b))

    inputs = (torch.ones(2), {"x": [torch.ones(1)]}, Pair(torch.ones(1), 3), "text")
    first, second, third, fourth = moved(inputs, torch.device("meta"))
    assert first.device.type == second["x"][0].device.type == third[0].device.type == "meta"
    assert isinstance(third, Pair)
    assert third[1] == 3
    assert fourth == "text"


def test_bucket_caps_are_sizes_of_buckets() -> None:
    def run(transport: Transport) -> list[list[int]]:
        layers = [nn.Linear(256, 256, bias=False) for _ in range(6)]  # 256 KiB each
        cuts = []
        for options in ({"bucket_cap_mb": 0.5}, {"bucket_cap_mb_list": [0.25, 0.75]}):
            ddp = DDP(nn.Sequential(*layers), transport, **options)
            cuts.append([len(bucket.parameters) for bucket in ddp._replica.buckets])
            ddp.close()
        return cuts

    assert on_ranks(run, 2) == [[[2, 2, 2], [1, 3, 2]]] * 2


@pytest.mark.parametrize(
    ("options", "at_the_start", "later"),
    [
        ({}, [1.0, 1.0], [5.0, 5.0]),
        ({"broadcast_buffers": False}, [1.0, 2.0], [5.0, 6.0]),
        ({"forward_sync_buffers": False}, [1.0, 1.0], [5.0, 6.0]),
        ({"init_sync": False}, [1.0, 2.0], [5.0, 5.0]),
        ({"init_sync": False, "algorithm": "powersgd"}, [1.0, 2.0], [5.0, 5.0]),
    ],
    ids=str,
)
def test_when_buffers_are_those_of_rank_0(
    options: dict[str, Any], at_the_start: list[float], later: list[float]
) -> None:
    def run(transport: Transport) -> tuple[float, float, float]:
        model = weight(transport.rank)
        model.register_buffer("seen", torch.tensor(transport.rank + 1.0))
        ddp = DDP(model, transport, **options)
        start, weights = ddp.module.seen.item(), ddp.module.weight.item()
        ddp.module.seen.fill_(transport.rank + 5.0)
        backward(ddp, 1)
        return start, ddp.module.seen.item(), weights

    results = on_ranks(run, 2)
    assert [start for start, _, _ in results] == at_the_start
    assert [seen for _, seen, _ in results] == later
    assert [weights for _, _, weights in results] == ([0.0, 1.0] if "init_sync" in options else [0.0, 0.0])


def test_parameters_marked_for_torchs_wrapper_stay_local() -> None:
    def run(transport: Transport) -> tuple[float, float]:
        model = nn.Sequential(weight(transport.rank), weight(transport.rank))
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["1.weight", "gone"])
        ddp = DDP(model, transport)
        return ddp.module[0].weight.item(), ddp.module[1].weight.item()

    assert on_ranks(run, 2) == [(0.0, 0.0), (0.0, 1.0)]


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_with_a_graph_are_averaged_and_keep_their_graph(caplog: pytest.LogCaptureFixture) -> None:
    def run(transport: Transport) -> tuple[float, bool, float]:
        ddp = DDP(weight(), transport)
        for _ in range(2):
            ddp.zero_grad()
            ddp(number(transport.rank + 1)).square().sum().backward(create_graph=True)
        gradient = ddp.module.weight.grad
        mean, has_graph = gradient.item(), gradient.requires_grad
        ddp.zero_grad()
        backward(ddp, transport.rank)
        return mean, has_graph, ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [(5.0, True, 0.5)] * 2
    assert "not through their graphs" in caplog.text


class Mesh:
    def __init__(self, ndim: int) -> None:
        self.ndim = ndim


class Sharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.weight.device_mesh = Mesh(1)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"mixed_precision": object()}, ConfigError, "torch.autocast"),
        ({"dim": 1}, ConfigError, "Leave dim out"),
        ({"device_ids": [0, 1]}, ConfigError, "names several devices"),
        ({"device_ids": 0}, ConfigError, r"must be a list, such as \[local_rank\]"),
        ({"static_graph": 1}, ConfigError, "static_graph=1 must be True or False"),
        ({"find_unused_parameters": None}, ConfigError, "must be True or False"),
        ({"gradient_as_bucket_view": "yes"}, ConfigError, "must be True or False"),
        ({"init_sync": 0}, ConfigError, "must be True or False"),
        ({"forward_sync_buffers": 0}, ConfigError, "must be True or False"),
        ({"init_sync": False, "algorithm": "diloco"}, ConfigError, "starts from equal weights"),
        ({"bucket_cap_mb": 0}, ConfigError, "must be a number above 0"),
        ({"bucket_cap_mb": True}, ConfigError, "must be a number above 0"),
        ({"bucket_cap_mb_list": [1, -1]}, ConfigError, "must be a number above 0"),
        ({"bucket_cap_mb": 1, "bucket_cap_mb_list": [1]}, ConfigError, "Give one"),
        ({"bucket_cap_mb": 1, "bucket_size_bytes": 100}, ConfigError, "Give one"),
        ({"delay_all_reduce_named_params": []}, ConfigError, r"ignore=\[...\]"),
        ({"param_to_hook_all_reduce": object()}, ConfigError, r"ignore=\[...\]"),
        ({"device_mesh": Mesh(2)}, UsageError, "Only 1D device mesh"),
        ({"device_mesh": Mesh(1), "process_group": object()}, UsageError, "Leave one of them out"),
        ({"bucket_size_bytes": -1}, ConfigError, "bucket_size_bytes=-1 must be a whole number, at least 1"),
        ({"broadcast_buffers": "no"}, ConfigError, "broadcast_buffers='no' must be True or False"),
        ({"ignore": "weight"}, ConfigError, r"ignore='weight' must be a list of names, such as \['weight'\]"),
        ({"no_such_thing": 1}, TypeError, "unexpected keyword argument 'no_such_thing'"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        DDP(weight(), **options)
    if "algorithm" not in options:
        with pytest.raises(kind, match=words):  # so frameworks refuse it, before there is a module
            check_options(**options)


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match="device_ids are given twice"):
        DDP(weight(), [0], device_ids=[0])
    with pytest.raises(ConfigError, match="is no Transport"):
        DDP(weight(), "gloo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is a DTensor"):
        DDP(Sharded(), device_mesh=Mesh(1))
    with pytest.raises(UsageError, match="no parameters"):
        DDP(nn.Module())


@pytest.mark.parametrize(
    ("positional", "options", "message"),
    [
        ((0,), {}, r"device ids are a list, such as \[0\]"),
        ((["x"],), {}, "'x' in device_ids or output_device is no device"),
        ((), {"output_device": "nowhere"}, "'nowhere' in device_ids or output_device is no device"),
        ((), {"device_mesh": "mesh"}, "device_mesh='mesh' is no DeviceMesh"),
    ],
)
def test_what_is_no_device_is_named(positional: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DDP(weight(), *positional, **options)
