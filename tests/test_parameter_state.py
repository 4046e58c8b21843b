"""State by parameter: it follows its parameter from bucket to bucket, and can be taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from murmura import Bucket
from murmura.algorithms.toolkit import ParameterState
from murmura.buckets.flat import plain_memory

PARAMETERS = {"a": nn.Parameter(torch.zeros(2, 2)), "b": nn.Parameter(torch.zeros(3))}


def bucket(*names: str) -> Bucket:
    return Bucket(0, names, [PARAMETERS[name] for name in names], plain_memory)


def test_it_begins_with_zeros_and_keeps_what_it_is_given() -> None:
    state = ParameterState()
    assert state.get("a") is None
    assert state.flat(bucket("a", "b")).tolist() == [0.0] * 7
    assert state.flat(bucket("a"), torch.float64).dtype == torch.float64
    given = torch.arange(7.0)
    state.set_flat(bucket("a", "b"), given)
    assert state.flat(bucket("a", "b")) is given  # no copy


def test_it_follows_its_parameter_from_bucket_to_bucket_and_back() -> None:
    state = ParameterState()
    state.set_flat(bucket("a", "b"), torch.arange(7.0))
    assert state.flat(bucket("b", "a")).tolist() == [4.0, 5.0, 6.0, 0.0, 1.0, 2.0, 3.0]
    assert state.flat(bucket("b")).tolist() == [4.0, 5.0, 6.0]
    state.set_flat(bucket("b"), torch.full((3,), 9.0))
    assert state.flat(bucket("a", "b")).tolist() == [0.0, 1.0, 2.0, 3.0, 9.0, 9.0, 9.0]
    state.set("a", torch.full((4,), 7.0))
    assert state.flat(bucket("a", "b")).tolist() == [7.0] * 4 + [9.0] * 3


def test_a_skipped_step_takes_it_back_to_the_first_that_was_kept() -> None:
    state = ParameterState()
    state.set_flat(bucket("a"), torch.ones(4))
    for number in (2.0, 3.0):  # two rounds, and no step
        state.keep()
        state.set_flat(bucket("a"), torch.full((4,), number))
        state.set("b", torch.zeros(3))
    resumed = ParameterState()
    resumed.load_state_dict(state.state_dict())
    for each in (state, resumed):
        assert each.flat(bucket("a")).tolist() == [3.0] * 4
        each.restore()
        assert each.flat(bucket("a")).tolist() == [1.0] * 4
        assert each.get("b") is None
        each.set_flat(bucket("a"), torch.zeros(4))
        each.restore()  # nothing is kept any more
        assert each.flat(bucket("a")).tolist() == [0.0] * 4


def test_what_was_applied_is_not_taken_back() -> None:
    state = ParameterState()
    state.keep()
    state.set_flat(bucket("a"), torch.ones(4))
    state.forget_kept()
    state.restore()
    assert state.flat(bucket("a")).tolist() == [1.0] * 4


def test_what_came_to_nothing_for_some_parameters_is_taken_back_for_these() -> None:
    state = ParameterState()
    state.restore_those_of(["a"])  # nothing is kept
    state.set("a", torch.ones(4))
    state.keep()
    state.set_flat(bucket("a", "b"), torch.full((7,), 2.0))
    state.restore_those_of(["b"])
    assert state.get("b") is None
    assert state.flat(bucket("a", "b")).tolist() == [2.0] * 4 + [0.0] * 3
    state.restore_those_of(["a"])
    assert state.flat(bucket("a", "b")).tolist() == [1.0] * 4 + [0.0] * 3


def test_a_tensor_on_a_gpu_is_not_used_again_before_the_stream_that_reads_it_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loaded one was allocated on the stream of training, and is dropped while an exchange beside it reads it."""
    recorded: list[tuple[Tensor, Any]] = []
    state, place = ParameterState(), bucket("b")
    state.load_state_dict({"tensors": {"b": torch.ones(3)}, "kept": None})
    loaded = state._tensors["b"]
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "beside")
    assert state.get("b") is loaded
    state.flat(place)
    assert [(tensor is loaded, stream) for tensor, stream in recorded] == [(True, "beside")] * 2
