"""Four bits, one bit, and a few of the elements: what each sends and loses."""

from __future__ import annotations

import functools
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.values import DTYPES, FINITE, KINDS, NON_FINITE, samples
from murmura import Compressor, ConfigError, ErrorFeedback, MinMaxUInt4, RandomK, Sign, TopK, TopKTwoBit, compressors
from murmura.compressors import cast, minmax_plain
from murmura.compressors import minmax as minmax_choice
from murmura.compressors.sparse import SAMPLE
from oracles import minmax


def round_trip(compressor: Compressor, values: Tensor) -> Tensor:
    out = torch.full_like(values, 11)
    compressor.decompress(compressor.encode(values), out)
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=12.5), b.nan_to_num(nan=12.5))


# Four bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "length"), [(2, 5), (64, 203), (100, 100), (256, 1)])
def test_four_bits_are_those_of_the_oracle(block_size: int, length: int, dtype: torch.dtype) -> None:
    compressor = MinMaxUInt4(block_size)
    for kind in KINDS:
        values = samples(kind, length, dtype)
        payload = compressor.encode(values)
        assert bytes(payload.tolist()) == minmax.encode(values, block_size, 15), kind
        expected = minmax.decode(bytes(payload.tolist()), length, dtype, block_size, 15)
        assert same(round_trip(compressor, values), expected), kind


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_four_bits_are_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    for kind in FINITE:
        values = samples(kind, 501, dtype)
        decoded = round_trip(MinMaxUInt4(100), values)
        for first, last in minmax.blocks_of(501, 100):
            block, got = values[first:last].double(), decoded[first:last].double()
            limits = torch.finfo(dtype)
            half_step = (block.max() / 15 - block.min() / 15) / 2 * (1 + 2**-14)
            assert bool(((got - block).abs() <= half_step + got.abs() * limits.eps / 2 + limits.tiny).all()), kind
            if block.min() <= 0 <= block.max():
                assert not got[block == 0].any(), kind


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 203])
def test_four_bits_are_subtracted_to_the_bit(length: int, dtype: torch.dtype) -> None:
    values, other = torch.randn(2, length, generator=torch.Generator().manual_seed(length)).to(dtype)
    payload = MinMaxUInt4(16).encode(values)
    left = other.clone()
    MinMaxUInt4(16).decompress_subtract(payload, left)
    assert torch.equal(left, other - round_trip(MinMaxUInt4(16), values))
    assert not torch.equal(left, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decodes", [False, True])
def test_what_four_bits_lose_is_what_is_not_decoded_to_the_bit(dtype: torch.dtype, decodes: bool) -> None:
    """Also of blocks that need more than the usual, in a tensor of several pieces; what is not finite is dropped."""
    compressor = MinMaxUInt4(64)
    for kind in KINDS:
        normal, largest = (
            samples("normal", minmax_plain.PIECE_ELEMENTS, dtype),
            torch.tensor([torch.finfo(dtype).max, -1.0], dtype=dtype),
        )
        values = torch.cat([normal, samples(kind, 203, dtype), largest, normal[:77]])
        payload = compressor.encode(values)
        held = torch.empty_like(values)
        compressor.decompress(payload, held)
        left, again, decoded = values.clone(), torch.full_like(payload, 7), torch.full_like(values, 7)
        compressor.compress_to_loss(left, again, decoded if decodes else None)
        assert torch.equal(again, payload), kind
        assert torch.equal(left, (values - held).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)), kind
        assert not decodes or same(decoded, held), kind


def test_feedback_decodes_what_it_encodes() -> None:
    first, second = ErrorFeedback(MinMaxUInt4(16)), ErrorFeedback(MinMaxUInt4(16))
    for seed in range(3):
        values = torch.randn(203, generator=torch.Generator().manual_seed(seed))
        payload, decoded = first.encode(values), values.clone()
        held = torch.empty_like(values)
        first.decompress(payload, held)
        again = torch.empty_like(payload)
        second.compress_decoding(decoded, again, decoded)
        assert torch.equal(again, payload)
        assert torch.equal(decoded, held)
        left, right = first.residual, second.residual
        assert left is not None
        assert right is not None
        assert torch.equal(left, right)


def test_a_residual_that_is_lent_stays_as_it_is() -> None:
    """One that is not makes room for the next, looked at or not: no memory is taken for each message."""
    feedback, values = ErrorFeedback(MinMaxUInt4()), torch.arange(7.0) ** 2
    feedback.encode(values)
    held = feedback.lend_residual()
    assert held is not None
    before = held.clone()
    feedback.encode(values)
    assert torch.equal(held, before)
    assert not torch.equal(feedback.state_dict()["residual"], before)
    assert (now := feedback.residual) is not None
    feedback.encode(values)
    assert feedback.residual is now


def test_the_bytes_of_four_bits_are_these() -> None:
    payload = MinMaxUInt4(4).encode(torch.tensor([-1.0, 0.0, 0.25, 1.0, 7.0]))
    assert bytes(payload.tolist()).hex() == minmax.encode(torch.tensor([-1.0, 0.0, 0.25, 1.0, 7.0]), 4, 15).hex()
    assert payload.numel() == MinMaxUInt4(4).payload_bytes(5, torch.float32) == 3 + 2 * 8
    assert MinMaxUInt4().payload_bytes(257, torch.float64) == 129 + 2 * 16


# One bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 7, 8, 203])
def test_a_sign_has_the_mean_magnitude_of_its_block(length: int, dtype: torch.dtype) -> None:
    values = samples("normal", length, dtype)
    decoded = round_trip(Sign(16), values)
    assert torch.equal(decoded >= 0, values >= 0)
    for first, last in minmax.blocks_of(length, 16):
        scale = values[first:last].double().abs().mean()
        assert torch.allclose(decoded[first:last].double().abs(), scale, rtol=4 * torch.finfo(dtype).eps)
    assert Sign(16).payload_bytes(length, torch.float32) == math.ceil(length / 8) + 4 * math.ceil(length / 16)


@pytest.mark.parametrize("length", [0, 1, 8, 203])
@pytest.mark.parametrize("make", [Sign, MinMaxUInt4])
def test_a_block_beyond_all_tensors_is_the_whole_tensor(make: Any, length: int) -> None:
    values = samples("normal", length, torch.float32)
    assert torch.equal(round_trip(make(8 * 10**30), values), round_trip(make(208), values))


@pytest.mark.parametrize("kind", NON_FINITE)
def test_what_is_not_finite_is_no_sign(kind: str) -> None:
    values = samples(kind, 203, torch.float32)
    for compressor in (Sign(16), Sign(16, scaled=False)):
        decoded = round_trip(compressor, values)
        for first, last in minmax.blocks_of(203, 16):
            is_finite = bool(values[first:last].isfinite().all())
            assert bool(decoded[first:last].isnan().all()) is not is_finite


def test_signs_without_a_scale_are_votes() -> None:
    values = torch.tensor([3.0, -0.5, 0.0, -0.0, -1e-30])
    assert round_trip(Sign(scaled=False), values).tolist() == [1, -1, 1, 1, -1]
    for scaled in (True, False):
        assert round_trip(Sign(scaled=scaled), torch.zeros(9)).tolist() == [0] * 9


# A few elements


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_elements_travel_as_they_are(dtype: torch.dtype) -> None:
    values = samples("normal", 1000, torch.float64).to(dtype)
    decoded = round_trip(TopK(0.05), values)
    sent = decoded != 0
    assert int(sent.sum()) == 50
    assert torch.equal(decoded[sent], values[sent])
    assert values[sent].abs().min() >= values[~sent].abs().max()


def spiky(length: int) -> Tensor:
    """Magnitudes of which a sample of every so many elements holds the large ones only."""
    values = torch.rand(length, generator=torch.Generator().manual_seed(length))
    values[:: length // SAMPLE | 1] += 1.0
    return values


@pytest.mark.parametrize("values", [spiky(200_003), torch.zeros(70_000), torch.arange(300_000.0) % 7], ids=len)
@pytest.mark.parametrize("ratio", [1e-5, 0.01, 0.03, 0.5])
def test_the_largest_of_many_are_found_exactly(values: Tensor, ratio: float) -> None:
    decoded = round_trip(TopK(ratio), values)
    count = math.ceil(ratio * len(values))
    assert torch.equal(decoded.sort(descending=True).values[:count], torch.topk(values, count).values)
    assert int((decoded != 0).sum()) <= count


def test_a_nan_among_many_is_among_the_largest() -> None:
    values = torch.rand(200_003, generator=torch.Generator().manual_seed(1))
    values[150_000] = math.nan  # not in the sample
    assert round_trip(TopK(0.01), values)[150_000].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 5, 64, 200])
def test_the_largest_of_each_chunk_have_two_magnitudes(length: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(length)
    magnitudes = torch.randperm(length, generator=random) + 1.0  # no two alike
    values = torch.where(torch.rand(length, generator=random) < 0.5, magnitudes, -magnitudes).to(dtype)
    compressor = TopKTwoBit(64, 8)
    decoded = round_trip(compressor, values)
    for first, last in minmax.blocks_of(length, 64):
        chunk, got = values[first:last].double(), decoded[first:last].double()
        sent = chunk.abs() >= chunk.abs().sort(descending=True).values[min(8, last - first) - 1]
        assert not got[~sent].any()
        high = sent & (chunk.abs() >= chunk[sent].abs().mean())
        for group in (high, sent & ~high):
            if bool(group.any()):
                wanted = chunk[group].abs().mean() * torch.where(chunk[group] >= 0, 1.0, -1.0).double()
                assert torch.allclose(got[group], wanted, rtol=4 * torch.finfo(dtype).eps, atol=0)
    count = sum(min(8, last - first) for first, last in minmax.blocks_of(length, 64))
    assert compressor.payload_bytes(length, torch.float32) == 2 * count + math.ceil(count / 4) + 8 * math.ceil(
        length / 64
    )


@pytest.mark.parametrize("places", [[], [3], [3, 40], [3, 40, 63]], ids=len)
def test_zeros_stay_zero_where_a_chunk_has_too_few_other_elements(places: list[int]) -> None:
    values = torch.zeros(128)
    values[places] = torch.tensor([-4.0, 1.0, -2.0])[: len(places)]
    decoded = round_trip(TopKTwoBit(64, 8), values)
    assert decoded.nonzero().view(-1).tolist() == places
    assert torch.equal(decoded.sign(), values.sign())
    magnitudes = {0: [], 1: [4.0], 2: [4.0, 1.0], 3: [4.0, 1.5, 1.5]}[len(places)]
    assert decoded[places].abs().tolist() == magnitudes


@pytest.mark.parametrize("kind", NON_FINITE)
def test_what_is_not_finite_shows(kind: str) -> None:
    for compressor in (TopK(0.01), TopKTwoBit(64, 8), RandomK(0.01)):
        decoded = round_trip(compressor, samples(kind, 203, torch.float32))
        assert not decoded.isfinite().all()


def test_what_waits_fades_with_the_decay() -> None:
    feedback = ErrorFeedback(TopK(0.1), decay=0.5).for_bucket()
    values = samples("normal", 100, torch.float64)
    first = round_trip(feedback, values)
    lost = values - first
    assert torch.equal(feedback.encode(values), TopK(0.1).encode(values + 0.5 * lost))


def test_random_elements_are_the_same_on_all_ranks_and_all_are_drawn_in_time() -> None:
    first, second = RandomK(0.1, seed=3).for_bucket(), RandomK(0.1, seed=3).for_bucket()
    drawn = torch.zeros(1003, dtype=torch.int64)
    for step in range(300):
        one, other = (samples("normal", 1003, torch.float32, seed) + 10 for seed in (2 * step, 2 * step + 1))
        ours, theirs = round_trip(first, one), round_trip(second, other)
        places = ours != 0
        assert torch.equal(places, theirs != 0)
        assert int(places.sum()) == 101
        assert torch.equal(ours[places], one[places])
        drawn += places
    assert int(drawn.min()) > 5
    assert int(drawn.max()) < 80
    assert not torch.equal(round_trip(RandomK(0.1, seed=4), one) != 0, round_trip(RandomK(0.1, seed=3), one) != 0)


def test_a_mean_of_random_elements_loses_nothing_when_it_is_sent_again() -> None:
    ranks = [RandomK(0.2).for_bucket() for _ in range(3)]
    again = RandomK(0.2).for_bucket()
    for step in range(3):
        mean = (
            sum((round_trip(each, samples("normal", 77, torch.float64, step)) for each in ranks), torch.zeros(77)) / 3
        )
        assert torch.equal(round_trip(again, mean), mean)


def test_the_number_of_the_draw_is_state() -> None:
    through = RandomK(0.1).for_bucket()
    values = samples("normal", 500, torch.float32)
    for _ in range(3):
        through.encode(values)
    resumed = RandomK(0.1).for_bucket()
    resumed.load_state_dict(through.state_dict())
    assert torch.equal(resumed.encode(values), through.encode(values))


@pytest.mark.parametrize(("numel", "count"), [(0, 0), (1, 1), (50, 1), (100, 1), (101, 2), (1000, 10)])
def test_at_least_one_element_is_sent(numel: int, count: int) -> None:
    assert TopK().payload_bytes(numel, torch.float16) == 6 * count
    assert TopK().payload_bytes(numel, torch.float64) == 10 * count
    assert RandomK().payload_bytes(numel, torch.float32) == 8 + 4 * count


# All of them


@pytest.mark.parametrize(
    "inner", [MinMaxUInt4(100), Sign(64), TopK(0.05), RandomK(0.05)], ids=lambda each: type(each).__name__
)
def test_feedback_sends_everything_in_time(inner: Compressor) -> None:
    """What was sent so far and the residual make what was to be sent; and the residual does not grow."""
    feedback = ErrorFeedback(inner).for_bucket()
    sent, given, sizes = torch.zeros(1001, dtype=torch.float64), torch.zeros(1001, dtype=torch.float64), []
    for step in range(200):
        values = samples("normal", 1001, torch.float64, step)
        feedback.decompress_add(feedback.encode(values), sent)
        given += values
        residual = feedback.residual
        assert residual is not None
        sizes.append(float(residual.norm()))
    assert torch.allclose(sent + residual, given, rtol=0, atol=1e-9)
    assert sizes[-1] < 1.5 * max(sizes[:150])


REFUSED: list[tuple[Any, dict[str, Any]]] = [
    (MinMaxUInt4, {"block_size": 3}),
    (MinMaxUInt4, {"block_size": 0}),
    (MinMaxUInt4, {"block_size": True}),
    (Sign, {"block_size": 12}),
    (Sign, {"scaled": 1}),
    (TopKTwoBit, {"chunk_size": 2**16}),
    (TopKTwoBit, {"count": 5000}),
    *((functools.partial(ErrorFeedback, Sign()), {"decay": decay}) for decay in (0, 1.1, math.nan, True, "x")),
    *((TopK, {"ratio": ratio}) for ratio in (0, 1.5, math.nan, "x", True)),
    *((RandomK, {"seed": seed}) for seed in (-1, 0.5, 2**31)),
]


@pytest.mark.parametrize(("make", "choice"), REFUSED, ids=str)
def test_nonsense_is_refused(make: Any, choice: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(choice))}="):
        make(**choice)


# Where Triton cannot compile


class PTXASError(Exception):
    """As Triton's own: no RuntimeError."""


def test_without_kernels_of_triton_plain_operations_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise PTXASError("Value 'sm_999' is not defined for option 'gpu-name'")

    triton = SimpleNamespace(encode=fail, convert=fail, encode_parts=fail)
    for name in ("minmax_triton", "cast_triton", "minmax_parts_triton"):
        monkeypatch.setitem(sys.modules, f"murmura.compressors.{name}", triton)
        monkeypatch.setattr(compressors, name, triton, raising=False)
    assert minmax_choice._cuda_kernels.__wrapped__(torch.device("cpu")) is minmax_plain
    assert cast._cuda_kernels.__wrapped__(torch.device("cpu")) is None
    monkeypatch.setattr(minmax_choice, "_cuda_kernels", lambda device: triton)  # those of one part can be compiled
    assert minmax_choice._cuda_part_kernels.__wrapped__(torch.device("cpu")) is None
    assert [message.endswith("'gpu-name'") for message in caplog.messages] == [True, True, True]
