"""Buckets: which parameters share one, and how gradients and tail lie in its memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from murmura import DDP, Transport, UsageError, run_world
from murmura.buckets import FIRST_BUCKET_BYTES, Bucket, ParameterSpec, bucket_limit, plan_buckets
from murmura.buckets.flat import FlatTensors, plain_memory
from worlds import SECONDS

CPU = torch.device("cpu")
META = torch.device("meta")
LARGE = 2**30  # no limit, for tests of something else


def specs(*numels: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> list[ParameterSpec]:
    return [ParameterSpec(f"p{index}", numel, dtype, device) for index, numel in enumerate(numels)]


def backwards(parameters: list[ParameterSpec]) -> list[int]:
    return list(reversed(range(len(parameters))))


def make_bucket(*parameters: Tensor, index: int = 0) -> Bucket:
    return Bucket(
        index,
        [f"p{number}" for number in range(len(parameters))],
        [nn.Parameter(parameter) for parameter in parameters],
        lambda numel, dtype, device: torch.full((numel,), -1.0, dtype=dtype, device=device),
    )


# The plan


def test_nothing_needs_no_bucket() -> None:
    assert plan_buckets([], [], LARGE) == []


def test_parameters_keep_the_order_in_which_gradients_are_expected() -> None:
    parameters = specs(1, 2, 3, 4)
    assert plan_buckets(parameters, backwards(parameters), LARGE) == [(3, 2, 1, 0)]
    assert plan_buckets(parameters, [2, 0, 3, 1], LARGE) == [(2, 0, 3, 1)]


def test_an_order_may_leave_parameters_out() -> None:
    assert plan_buckets(specs(1, 2, 3, 4), [3, 1], LARGE) == [(3, 1)]


def test_a_bucket_holds_at_most_its_size() -> None:
    parameters = specs(10, 10, 10, 10, 10)
    assert plan_buckets(parameters, backwards(parameters), bucket_bytes=80) == [(4, 3), (2, 1), (0,)]
    assert plan_buckets(parameters, backwards(parameters), bucket_bytes=79) == [(4,), (3,), (2,), (1,), (0,)]


def test_bytes_count_not_elements() -> None:
    parameters = specs(10, 10, 10, 10, dtype=torch.float64)
    assert plan_buckets(parameters, backwards(parameters), bucket_bytes=160) == [(3, 2), (1, 0)]
    parameters = specs(10, 10, 10, 10, dtype=torch.bfloat16)
    assert plan_buckets(parameters, backwards(parameters), bucket_bytes=80) == [(3, 2, 1, 0)]


def test_a_parameter_larger_than_a_bucket_is_alone() -> None:
    parameters = specs(1, 1000, 1, 1)
    assert plan_buckets(parameters, backwards(parameters), bucket_bytes=40) == [(3, 2), (1,), (0,)]


def test_the_first_bucket_is_smaller() -> None:
    megabyte = FIRST_BUCKET_BYTES // 4
    parameters = specs(*[megabyte // 2] * 8)  # 4 MiB in all
    assert plan_buckets(parameters, backwards(parameters), bucket_bytes=3 * FIRST_BUCKET_BYTES) == [
        (7, 6),
        (5, 4, 3, 2, 1, 0),
    ]


def test_the_size_of_the_first_bucket_can_be_given() -> None:
    parameters = specs(10, 10, 10, 10)
    assert plan_buckets(parameters, backwards(parameters), 120, first_bytes=40) == [(3,), (2, 1, 0)]


def test_a_bucket_that_fills_takes_the_parameter_that_brings_it_there() -> None:
    parameters = specs(10, 10, 10, 10, 10)  # of 40 bytes each
    filled = plan_buckets(parameters, backwards(parameters), 80, first_bytes=40, fills=True)
    assert filled == [(4,), (3, 2), (1, 0)]
    assert plan_buckets(parameters, backwards(parameters), 81, first_bytes=1, fills=True) == [(4,), (3, 2, 1), (0,)]
    assert plan_buckets(parameters, backwards(parameters), LARGE, fills=True) == [(4, 3, 2, 1, 0)]


def test_only_one_bucket_is_smaller_whatever_the_number_of_dtypes() -> None:
    parameters = [ParameterSpec(f"p{i}", 10, (torch.float32, torch.float64)[i % 2], CPU) for i in range(6)]
    # p5 p3 p1 are float64 (80 bytes each), p4 p2 p0 float32 (40 bytes each); the first that is full is closed at 80.
    assert plan_buckets(parameters, backwards(parameters), 240, first_bytes=80) == [(5,), (3, 1), (4, 2, 0)]


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16, torch.complex64])
def test_a_bucket_has_one_dtype(other: torch.dtype) -> None:
    parameters = [ParameterSpec(f"p{i}", 3, (torch.float32, other)[i % 2], CPU) for i in range(4)]
    assert plan_buckets(parameters, backwards(parameters), LARGE) == [(3, 1), (2, 0)]


def test_a_bucket_has_one_device() -> None:
    parameters = [ParameterSpec(f"p{i}", 3, torch.float32, (CPU, META)[i % 2]) for i in range(4)]
    assert plan_buckets(parameters, backwards(parameters), LARGE) == [(3, 1), (2, 0)]


def test_buckets_come_in_the_order_in_which_they_are_complete() -> None:
    # Backward: p5 (bf16), p4 (fp32), p3 (fp32), p2 (fp32), p1 (bf16), p0 (fp32).
    half = {1, 5}
    parameters = [ParameterSpec(f"p{i}", 10, torch.bfloat16 if i in half else torch.float32, CPU) for i in range(6)]
    # The bf16 bucket is opened first, but is full only when p1 has come.
    assert plan_buckets(parameters, backwards(parameters), 80) == [(4, 3), (5, 1), (2, 0)]


def test_empty_parameters_travel_with_the_others() -> None:
    assert plan_buckets(specs(0, 3, 0), [2, 1, 0], LARGE) == [(2, 1, 0)]


# The memory


def test_gradients_lie_side_by_side() -> None:
    bucket = make_bucket(torch.zeros(2, 3), torch.zeros(4))
    assert bucket.numels == [6, 4]
    bucket.views[0].copy_(torch.arange(6.0).view(2, 3))
    bucket.views[1].copy_(torch.arange(6.0, 10.0))
    assert bucket.flat.tolist() == list(range(10))


def test_the_memory_comes_from_the_given_allocator() -> None:
    asked: list[tuple[int, torch.dtype, torch.device]] = []

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        asked.append((numel, dtype, device))
        return torch.zeros(numel, dtype=dtype, device=device)

    Bucket(0, ["a"], [nn.Parameter(torch.zeros(5, dtype=torch.float64))], allocate)
    assert asked == [(5, torch.float64, CPU)]


@pytest.mark.parametrize(
    "parameter",
    [
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.zeros(1, 1),
        torch.zeros(3, 4),
        torch.zeros(3, 4).t(),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(2, 1, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(2, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.zeros(2, 3, 2, 4, 5).to(memory_format=torch.channels_last_3d),
        torch.zeros(2, 3, 4).permute(1, 2, 0),
    ],
    ids=lambda parameter: f"{tuple(parameter.shape)}-{parameter.stride()}",
)
def test_a_view_has_the_strides_of_its_parameter(parameter: Tensor) -> None:
    bucket = make_bucket(torch.zeros(3), parameter, torch.zeros(2))
    view = bucket.views[1]
    assert view.shape == parameter.shape
    if parameter.numel():
        assert view.stride() == parameter.stride()
    values = torch.arange(float(parameter.numel())).view(parameter.shape)
    view.copy_(values)
    assert torch.equal(view, values)
    # It fills its own part of the flat memory, and nothing else.
    assert sorted(bucket.flat[3 : 3 + parameter.numel()].tolist()) == list(range(parameter.numel()))
    assert bucket.flat[:3].tolist() == [-1.0] * 3
    assert set(bucket.flat[3 + parameter.numel() :].tolist()) == {-1.0}


def test_a_parameter_with_gaps_gets_a_dense_view() -> None:
    gappy = torch.zeros(4, 6)[:, ::2]
    bucket = Bucket(0, ["p"], [nn.Parameter(gappy)], lambda n, dtype, device: torch.zeros(n, dtype=dtype))
    assert bucket.views[0].shape == gappy.shape
    assert bucket.views[0].is_contiguous()


def test_an_expanded_parameter_gets_memory_for_every_element() -> None:
    bucket = make_bucket(torch.zeros(3, 1).expand(3, 4))
    bucket.views[0].copy_(torch.arange(12.0).view(3, 4))
    assert bucket.flat.tolist() == list(range(12))


def test_a_gradient_that_is_removed_before_its_bucket_is_full_is_refused() -> None:
    """On a GPU gradients are taken when their bucket is full."""
    bucket = make_bucket(torch.zeros(2), torch.zeros(3))
    with pytest.raises(UsageError, match="'p1' was removed before it was sent"):
        bucket.gradient_outside(1)


def test_a_bucket_says_what_it_is() -> None:
    assert repr(make_bucket(torch.zeros(3), torch.zeros(2), index=4)) == "Bucket(4, 2 parameters from 'p0', 20 bytes)"


@pytest.mark.parametrize(
    ("total_mib", "asked_mib", "given_mib"),
    [(0.5, 25, 1), (4, 25, 1), (16, 25, 2), (20, 25, 2.5), (200, 25, 25), (1000, 25, 25), (1000, 4, 4), (16, 1, 1)],
)
def test_a_small_model_is_cut_too(total_mib: float, asked_mib: float, given_mib: float) -> None:
    specs = [ParameterSpec("x", int(total_mib * 2**20) // 4, torch.float32, torch.device("cpu"))]
    assert bucket_limit(specs, int(asked_mib * 2**20)) == int(given_mib * 2**20)
    assert bucket_limit(specs, 1) == 1


def test_between_hosts_a_small_model_is_cut_into_fewer() -> None:
    model = specs(10 * 2**20)  # 40 MiB
    assert bucket_limit(model, LARGE) == 5 * 2**20
    assert bucket_limit(model, LARGE, num_hosts=2) == 10 * 2**20
    assert bucket_limit(model, 2**20, num_hosts=2) == 2**20


def num_buckets(transport: Transport) -> int:
    ddp = DDP(nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16))), transport)  # 16 MiB
    ddp(torch.ones(1, 512)).sum().backward()
    found = len(ddp.algorithm_state_dict()["plan"]["buckets"])
    ddp.close()
    return found


def test_ddp_cuts_into_fewer_buckets_where_ranks_are_on_several_hosts() -> None:
    assert run_world(num_buckets, 2, timeout=SECONDS) == [9, 9]  # the first one has 1 MiB
    assert run_world(num_buckets, 2, hosts=[0, 1], timeout=SECONDS) == [5, 5]


# Flat tensors


def mixed_tensors() -> list[Tensor]:
    return [
        torch.arange(6.0).view(2, 3),
        torch.tensor(7),
        torch.empty(0),
        torch.arange(8.0).view(2, 4).t(),
        torch.tensor([1 + 2j]),
    ]


def test_tensors_of_a_dtype_share_a_flat_in_their_order() -> None:
    tensors = mixed_tensors()
    flats = FlatTensors(tensors).allocate(plain_memory)
    assert [flat.dtype for flat in flats] == [torch.float32, torch.int64, torch.complex64]
    assert flats[0].tolist() == [0, 1, 2, 3, 4, 5, 0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("contiguous", [False, True])
def test_flats_written_back_give_every_tensor_its_values(contiguous: bool) -> None:
    tensors = [each.contiguous() for each in mixed_tensors()] if contiguous else mixed_tensors()
    packing = FlatTensors(tensors)
    flats = packing.allocate(plain_memory)
    before = [each.clone() for each in tensors]
    for part, tensor in zip(packing.parts(flats), tensors, strict=True):
        assert torch.equal(part, tensor)
    for flat in flats:
        flat.mul_(2)
    packing.write(flats)
    assert all(torch.equal(after, 2 * each) for after, each in zip(tensors, before, strict=True))
    packing.add(flats)
    assert all(torch.equal(after, 4 * each) for after, each in zip(tensors, before, strict=True))


def test_keys_group_tensors_otherwise() -> None:
    tensors = [torch.full((2,), float(value)) for value in range(3)]
    flats = FlatTensors(tensors, ["a", "b", "a"]).allocate(plain_memory)
    assert [flat.tolist() for flat in flats] == [[0, 0, 2, 2], [1, 1]]
