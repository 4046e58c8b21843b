"""How the wrapper looks to code that was written for torch's DistributedDataParallel."""

from __future__ import annotations

import copy
import io
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from ddp.models import backward, fill, number, on_ranks, weight
from murmura import DDP, Transport, UsageError
from murmura.ddp.replica import ModelReplica


class Model(nn.Module):
    """With attributes, methods and parts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = weight()
        self._hidden = weight()
        self.scale = 3
        self._private = 4

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self._hidden(self.encode(x))


def test_attributes_and_methods_of_the_module_are_reached_through_the_wrapper() -> None:
    def run(transport: Transport) -> float:
        ddp = DDP(Model(), transport)
        assert ddp.scale == 3
        assert ddp.encoder is ddp.module.encoder
        assert ddp._hidden is ddp.module._hidden
        for name in ("no_such_name", "_private"):
            with pytest.raises(AttributeError, match=f"'DDP' object has no attribute '{name}'"):
                getattr(ddp, name)
        ddp.encode(number(transport.rank)).sum().backward()
        return ddp.encoder.weight.grad.item()

    assert on_ranks(run, 2) == [1.5, 1.5]


def test_names_of_parameters_have_the_prefix_and_those_of_the_state_have_none() -> None:
    ddp = DDP(Model())
    assert [name for name, _ in ddp.named_parameters()] == ["module.encoder.weight", "module._hidden.weight"]
    assert list(ddp.state_dict()) == ["encoder.weight", "_hidden.weight"]
    ddp.close()


def test_the_state_functions_of_torchs_distributed_checkpoint_give_plain_names() -> None:
    ddp = DDP(fill(Model()))
    state = get_model_state_dict(ddp)
    assert state.keys() == ddp.module.state_dict().keys()
    doubled = {name: 2 * value for name, value in state.items()}
    set_model_state_dict(ddp, doubled)
    assert torch.equal(ddp.module.encoder.weight, doubled["encoder.weight"])
    ddp.close()


def test_the_wrapper_is_neither_saved_nor_copied() -> None:
    ddp = DDP(weight())
    with pytest.raises(UsageError, match=r"Save ddp.state_dict\(\) instead"):
        torch.save(ddp, io.BytesIO())
    with pytest.raises(UsageError, match=r"copy.deepcopy\(ddp.module\)"):
        copy.deepcopy(ddp)
    ddp.close()


def test_require_backward_grad_sync_is_what_no_sync_sets() -> None:
    def run(transport: Transport) -> list[float]:
        ddp = DDP(weight(), transport)
        assert ddp.require_backward_grad_sync
        with ddp.no_sync():
            assert not ddp.require_backward_grad_sync
        seen = []
        ddp.require_backward_grad_sync = False
        backward(ddp, transport.rank)
        seen.append(ddp.module.weight.grad.item())
        ddp.require_backward_grad_sync = True
        backward(ddp, transport.rank)
        seen.append(ddp.module.weight.grad.item())
        return seen

    assert on_ranks(run, 2) == [[0.0, 1.0], [1.0, 1.0]]


def test_prepare_for_backward_makes_the_next_backward_a_round() -> None:
    """As Accelerate's `trigger_sync_in_backward` does, for a forward that ran inside `no_sync`."""

    def run(transport: Transport) -> float:
        ddp = DDP(weight(), transport)
        with ddp.no_sync():
            loss = ddp(number(transport.rank)).sum()
            before = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
            ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
            ddp.reducer.prepare_for_backward([])
            loss.backward()
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = before
            assert not ddp.require_backward_grad_sync
        return ddp.module.weight.grad.item()

    assert on_ranks(run, 2) == [0.5, 0.5]


def test_require_forward_param_sync_holds_back_the_buffers_of_one_round() -> None:
    def run(transport: Transport) -> list[Any]:
        model = weight()
        model.register_buffer("seen", torch.zeros(1))
        ddp = DDP(model, transport)
        seen = []
        for value in (False, True):
            ddp.module.seen.fill_(transport.rank)
            ddp.require_forward_param_sync = value
            backward(ddp, 1)
            assert ddp.require_forward_param_sync
            seen.append(ddp.module.seen.item())
        return seen

    assert on_ranks(run, 2) == [[0.0, 0.0], [1.0, 0.0]]


def test_require_forward_param_sync_holds_back_the_buffers_of_a_round_that_begins_late() -> None:
    def run(transport: Transport) -> float:
        model = weight()
        model.register_buffer("seen", torch.zeros(1))
        ddp = DDP(model, transport)
        ddp.eval()
        ddp.module.seen.fill_(transport.rank)
        ddp.require_forward_param_sync = False
        backward(ddp, 1)
        assert ddp.require_forward_param_sync
        ddp.settle()
        return ddp.module.seen.item()

    assert on_ranks(run, 2) == [0.0, 1.0]


class _Versioned(nn.Module):
    """A part that asks for the version of what it loads."""

    _version = 3
    loaded: Any = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *args: Any) -> None:
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)


def test_versions_of_the_parts_come_with_a_prefix_too() -> None:
    prefixed = nn.Module()
    prefixed.module = nn.Sequential(weight(), _Versioned())
    with closing(DDP(nn.Sequential(weight(), _Versioned()))) as ddp:
        ddp.load_state_dict(prefixed.state_dict())
        assert ddp.module[1].loaded == 3


class _Broken(torch.nn.Linear):
    @property
    def broken(self) -> float:
        raise AttributeError("this module has no scale yet")


def test_an_error_inside_a_property_of_the_module_names_the_module() -> None:
    with closing(DDP(_Broken(1, 1))) as ddp, pytest.raises(AttributeError, match="'_Broken' object"):
        ddp.broken  # noqa: B018


def test_the_arguments_can_be_read_under_torchs_names() -> None:
    by_default = DDP(Model())
    torchs = {"dim": 0, "device": torch.device("cpu"), "device_type": "cpu", "device_ids": None, "output_device": None}
    torchs |= {"find_unused_parameters": False, "static_graph": False, "broadcast_buffers": True, "device_mesh": None}
    torchs |= {"bucket_bytes_cap": 25 * 2**20, "broadcast_bucket_size": 250 * 2**20, "mixed_precision": None}
    assert {name: getattr(by_default, name) for name in torchs} == torchs
    by_default.close()
    told = DDP(
        Model(), find_unused_parameters=True, broadcast_buffers=False, bucket_cap_mb=1, ignore=["_hidden.weight"]
    )
    assert (told.find_unused_parameters, told.broadcast_buffers, told.bucket_bytes_cap) == (True, False, 2**20)
    assert told.parameters_to_ignore == {"_hidden.weight"}
    told.close()


def test_scripts_that_declare_a_static_graph_late_and_wrap_again_run() -> None:
    def run(transport: Transport) -> float:
        module = weight()
        first = DDP(module, transport)
        first._set_static_graph()
        assert first.static_graph
        backward(first, transport.rank)
        first._remove_autograd_hooks()
        again = DDP(module, transport)
        module.zero_grad()
        backward(again, transport.rank)
        return module.weight.grad.item()

    assert on_ranks(run, 2) == [0.5, 0.5]


def test_a_large_model_is_copied_in_parts_to_be_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmura.ddp.replica.BROADCAST_BYTES", 48)

    def run(transport: Transport) -> tuple[list[float], list[int]]:
        sizes: list[int] = []

        def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            sizes.append(numel)
            return torch.empty(numel, dtype=dtype, device=device)

        tensors = [torch.full((length,), float(transport.rank + 1)) for length in (4, 8, 30, 1)]
        ModelReplica(nn.Identity(), transport, ()).broadcast(tensors, 1, allocate)
        return [float(each.mean()) for each in tensors], sizes

    assert on_ranks(run, 2) == [([2.0] * 4, [12, 30, 1])] * 2


def test_a_module_that_names_its_state_otherwise_loads_it() -> None:
    """As torch's checkpoint_wrapper does: the names of its parameters are not those of its state."""

    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = checkpoint_wrapper(nn.Linear(2, 2))

    with closing(DDP(Wrapping())) as ddp:
        state = {name: torch.ones_like(value) for name, value in ddp.state_dict().items()}
        assert sorted(state) == ["module.bias", "module.weight"]
        ddp.load_state_dict(state)
        assert all((parameter == 1.0).all() for parameter in ddp.parameters())
