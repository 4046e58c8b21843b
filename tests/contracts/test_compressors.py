"""One contract for every compressor, and the promises of each."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from contracts.values import DTYPES, FINITE, KINDS, NON_FINITE, samples
from murmura import (
    Cast,
    Compressor,
    ConfigError,
    ErrorFeedback,
    MinMaxUInt4,
    MinMaxUInt8,
    RandomK,
    Sign,
    TopK,
    TopKTwoBit,
    UsageError,
    run_world,
)
from oracles import minmax

LENGTHS = [0, 1, 3, 1001]
COMPRESSORS: dict[str, Compressor] = {
    "MinMaxUInt8": MinMaxUInt8(),
    "MinMaxUInt8(7)": MinMaxUInt8(7),
    "MinMaxUInt8(1)": MinMaxUInt8(1),
    "MinMaxUInt8(None)": MinMaxUInt8(None),
    "Cast(float16)": Cast(torch.float16),
    "Cast(bfloat16)": Cast(torch.bfloat16),
    "Cast(float32)": Cast(torch.float32),
    "MinMaxUInt4": MinMaxUInt4(),
    "MinMaxUInt4(6)": MinMaxUInt4(6),
    "Sign": Sign(),
    "Sign(8)": Sign(8),
    "Sign(unscaled)": Sign(scaled=False),
    "TopK": TopK(),
    "TopK(1)": TopK(1.0),
    "RandomK": RandomK(),
    "RandomK(0.3)": RandomK(0.3, seed=7),
    "TopKTwoBit": TopKTwoBit(),
    "TopKTwoBit(7)": TopKTwoBit(7, 3),
    "ErrorFeedback(TopKTwoBit)": ErrorFeedback(TopKTwoBit(64, 8), decay=0.9),
    "ErrorFeedback(TopK)": ErrorFeedback(TopK(0.1)),
    "ErrorFeedback(RandomK)": ErrorFeedback(RandomK(0.1)),
    "ErrorFeedback(MinMaxUInt8)": ErrorFeedback(MinMaxUInt8(100)),
    "ErrorFeedback(Cast)": ErrorFeedback(Cast(torch.bfloat16)),
}


CLOSE = (MinMaxUInt8, Cast)  # of the others, test_few_bits.py says what is lost


@dataclass(frozen=True)
class Settings:
    """As an algorithm holds a compressor."""

    compressor: Compressor = field(default_factory=MinMaxUInt8)


def inner_of(compressor: Compressor) -> Compressor:
    return compressor.inner if isinstance(compressor, ErrorFeedback) else compressor


def takes(compressor: Compressor, dtype: torch.dtype) -> bool:
    inner = inner_of(compressor)
    return not isinstance(inner, Cast) or dtype == inner.dtype or dtype.itemsize > inner.dtype.itemsize


CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, compressor in COMPRESSORS.items()
    for dtype in DTYPES
    if takes(compressor, dtype)
]


def payload_for(compressor: Compressor, values: Tensor, offset: int = 0) -> Tensor:
    """Room for `values` at a byte offset of a larger buffer, which begins and ends with sevens."""
    size = compressor.payload_bytes(values.numel(), values.dtype)
    return torch.full((offset + size + 5,), 7, dtype=torch.uint8)[offset : offset + size]


def compressed(compressor: Compressor, values: Tensor, offset: int = 0) -> Tensor:
    payload = payload_for(compressor, values, offset)
    compressor.compress(values, payload)
    return payload


def decompressed(compressor: Compressor, payload: Tensor, like: Tensor) -> Tensor:
    out = torch.full_like(like, 11)
    compressor.decompress(payload, out)
    return out


def round_trip(compressor: Compressor, values: Tensor) -> Tensor:
    return decompressed(compressor, compressed(compressor, values), values)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=12.5), b.nan_to_num(nan=12.5))


# Every compressor


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_values_travel_in_exactly_their_bytes(name: str, dtype: torch.dtype) -> None:
    for length in LENGTHS:
        values = samples("normal", length, dtype)
        kept = values.clone()
        decoded = []
        for offset in range(4):
            compressor = COMPRESSORS[name].for_bucket()
            payload = compressed(compressor, values, offset)
            whole = payload._base
            assert whole is not None
            assert whole[:offset].tolist() == [7] * offset
            assert whole[-5:].tolist() == [7] * 5
            decoded.append(decompressed(compressor, payload, values))
        assert torch.equal(values, kept)
        assert all(torch.equal(each, decoded[0]) for each in decoded)
        if isinstance(inner_of(COMPRESSORS[name]), CLOSE):
            assert torch.allclose(decoded[0].double(), values.double(), atol=0.05)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_decode_and_add_is_decode_and_then_add(name: str, dtype: torch.dtype) -> None:
    for kind in KINDS:
        compressor = COMPRESSORS[name].for_bucket()
        values = samples(kind, 1001, dtype)
        payload = compressed(compressor, values)
        total = samples("offset", 1001, dtype)
        expected = total.clone().add_(decompressed(compressor, payload, values))
        compressor.decompress_add(payload, total)
        assert same(total, expected), kind


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_same_values_give_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    values = samples("normal", 1001, dtype)
    first, second = (compressed(COMPRESSORS[name].for_bucket(), values) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", [name for name in COMPRESSORS if "Cast(float32)" not in name])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_decode_into_floats_as_means_need_them(name: str, dtype: torch.dtype) -> None:
    if not takes(COMPRESSORS[name], dtype):
        return
    values = samples("normal", 1001, dtype)
    compressor = COMPRESSORS[name].for_bucket()
    payload = compressed(compressor, values)
    floats = decompressed(compressor, payload, values.float())
    assert torch.equal(floats.to(dtype), decompressed(compressor, payload, values))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_to_encode_is_to_compress_into_new_memory(name: str) -> None:
    values = samples("normal", 1001, torch.float64)
    one, other = COMPRESSORS[name].for_bucket(), COMPRESSORS[name].for_bucket()
    assert torch.equal(one.encode(values), compressed(other, values))
    assert not one.is_uneven


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_parameter_can_be_compressed_and_written(name: str) -> None:
    compressor = COMPRESSORS[name].for_bucket()
    parameter = torch.nn.Parameter(samples("normal", 10, torch.float64))
    payload = compressed(compressor, parameter)
    expected = decompressed(compressor, payload, parameter.detach())
    compressor.decompress(payload, parameter)
    assert torch.equal(parameter.detach(), expected)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_compressor_is_a_value(name: str) -> None:
    compressor = COMPRESSORS[name]
    classes = (MinMaxUInt8, MinMaxUInt4, Sign, TopK, TopKTwoBit, RandomK, Cast, ErrorFeedback)
    twin = eval(repr(compressor), {"torch": torch, **{each.__name__: each for each in classes}})
    assert twin == compressor
    assert hash(twin) == hash(compressor)
    assert pickle.loads(pickle.dumps(compressor)) == compressor
    assert [other for other in COMPRESSORS.values() if other == compressor] == [compressor]
    assert hash(Settings(compressor)) == hash(Settings(twin))
    assert compressor.for_bucket() == compressor


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_call_that_makes_no_sense_is_refused(name: str) -> None:
    compressor = COMPRESSORS[name].for_bucket()
    values = torch.zeros(8, dtype=torch.float64)
    payload = payload_for(compressor, values)
    wrong = {
        "flat contiguous": (values.view(2, 4), payload),
        "flat contiguous ": (torch.zeros(16, dtype=torch.float64)[::2], payload),
        "bytes in": (values, payload[:-1]),
        "bytes in ": (values, payload.view(torch.int8)),
        "cannot be compressed": (torch.zeros(8, dtype=torch.int64), payload),
        "move one of them": (values, payload.to("meta")),
    }
    for told, (tensor, room) in wrong.items():
        with pytest.raises(UsageError, match=told.strip()):
            compressor.compress(tensor, room)
        with pytest.raises(UsageError, match=told.strip()):
            compressor.decompress(room, tensor)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_threads_do_not_disturb_each_other(name: str) -> None:
    values = [samples("normal", 3001, torch.float64, seed) for seed in range(4)]
    expected = [compressed(COMPRESSORS[name].for_bucket(), each) for each in values]

    def work(transport: object) -> bool:
        return all(
            torch.equal(compressed(COMPRESSORS[name].for_bucket(), each), payload)
            for each, payload in zip(values, expected, strict=True)
        )

    assert all(run_world(work, 3))


# MinMaxUInt8


def bound(block: Tensor, decoded: Tensor) -> Tensor:
    """Half a step, with its slack, and the dtype's own rounding: half a unit, a whole one among the subnormals."""
    limits = torch.finfo(decoded.dtype)
    exact = block.double()
    half_step = (exact.max() / 255 - exact.min() / 255) / 2 * (1 + 2**-14)
    return half_step + decoded.double().abs() * limits.eps / 2 + limits.tiny * limits.eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 7, 100, 4096, None])
def test_the_error_is_at_most_half_a_step(dtype: torch.dtype, block_size: int | None) -> None:
    for kind in FINITE:
        for length in (1, 3, 51 if block_size == 1 else 501):
            values = samples(kind, length, dtype)
            decoded = round_trip(MinMaxUInt8(block_size), values)
            assert bool(decoded.isfinite().all()), kind
            for first, last in minmax.blocks_of(length, block_size):
                check_block(values[first:last], decoded[first:last], kind)


def check_block(block: Tensor, decoded: Tensor, kind: str) -> None:
    assert bool(((decoded.double() - block.double()).abs() <= bound(block, decoded)).all()), kind
    if block.min() <= 0 <= block.max():
        assert not decoded[block == 0].any(), kind
    if block.min() == block.max():
        assert torch.equal(decoded, block), kind


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NON_FINITE)
def test_what_is_not_finite_stays_in_its_block(kind: str, dtype: torch.dtype) -> None:
    for seed in range(5):
        values = samples(kind, 1001, dtype, seed)
        decoded = round_trip(MinMaxUInt8(100), values)
        for first, last in minmax.blocks_of(1001, 100):
            if bool(values[first:last].isfinite().all()):
                assert torch.equal(decoded[first:last], round_trip(MinMaxUInt8(100), values[first:last].clone()))
            else:
                assert bool(decoded[first:last].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "length"), [(1, 5), (64, 203), (100, 100), (None, 203)])
def test_the_oracle_agrees_to_the_bit(block_size: int | None, length: int, dtype: torch.dtype) -> None:
    for kind in KINDS:
        values = samples(kind, length, dtype)
        payload = compressed(MinMaxUInt8(block_size), values)
        assert bytes(payload.tolist()) == minmax.encode(values, block_size), kind
        expected = minmax.decode(bytes(payload.tolist()), length, dtype, block_size)
        assert same(decompressed(MinMaxUInt8(block_size), payload, values), expected), kind


# Payloads as they were when the layout was settled: ranks of different versions must understand each other.
GOLDEN = [
    (torch.float32, None, [-1.0, 0.0, 0.25, 1.0], "0180a0ff008280bf0082003c"),
    (torch.float32, 3, [1.0, 2.0, 1.3, -0.0, 0.0], "00ff4c00000000803f0082803b0000000000000000"),
    (torch.float16, None, [-65504.0, 0.0, 65504.0], "0180ff007180c700710044"),
    (torch.bfloat16, 2, [1.5, 1.5, -3e38, 3e38], "000001ff0000c03f0000000000e462fb00e4e2f7"),
    (torch.float64, None, [1000000000.0, 1000000001.0, 1000000000.25], "00ff400000000065cdcd41001110101010703f"),
    (torch.float32, 2, [math.inf, 1.0, 7.0], "0000000000c07f0000c07f0000e04000000000"),
    (torch.float32, None, [0.0, 1e-44, 7e-44], "cdd4ffcd00008001000000"),
]


@pytest.mark.parametrize(("dtype", "block_size", "values", "payload"), GOLDEN)
def test_the_bytes_are_these(dtype: torch.dtype, block_size: int | None, values: list[float], payload: str) -> None:
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert bytes(compressed(MinMaxUInt8(block_size), tensor).tolist()).hex() == payload
    assert minmax.encode(tensor, block_size).hex() == payload


@pytest.mark.parametrize("block_size", [4096, 2**19, None])
def test_a_tensor_of_many_pieces_is_the_sum_of_its_blocks(block_size: int | None) -> None:
    values = samples("normal", 2**20 + 17, torch.float32)
    values[5000:9000] += 50  # some blocks lie off zero
    decoded = round_trip(MinMaxUInt8(block_size), values)
    blocks = [values[first:last].clone() for first, last in minmax.blocks_of(values.numel(), block_size)]
    assert torch.equal(decoded, torch.cat([round_trip(MinMaxUInt8(None), block) for block in blocks]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_codes_at_the_edge_of_a_step_do_not_wrap(dtype: torch.dtype) -> None:
    """Where the maximum lies between two codes, give or take a rounding, and the minimum as well."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(20_000, 1, generator=generator, dtype=dtype) + 1
    payload = compressed(MinMaxUInt8(2), torch.cat((torch.zeros_like(spread), spread), 1).view(-1))
    step = payload[40_000:].view(dtype).view(-1, 2)[:, 1:]
    middle = torch.randint(1, 254, (20_000, 1), generator=generator).to(dtype) + 0.5
    nudge = torch.randint(-3, 4, (20_000, 1), generator=generator).to(dtype) * torch.finfo(dtype).eps
    for high in ((middle + middle * nudge) * step, spread - (middle + middle * nudge) * step):
        blocks = torch.cat((high - spread, torch.zeros_like(high), high), 1)
        decoded = round_trip(MinMaxUInt8(3), blocks.view(-1)).view(-1, 3)
        assert bool(((decoded - blocks).abs() <= step * 0.5001).all())
        assert not decoded[:, 1].any()


def test_one_outlier_costs_one_block_its_resolution() -> None:
    values = samples("normal", 8192, torch.float32) * 1e-3
    values[5000] = 1e3
    decoded = round_trip(MinMaxUInt8(), values)
    assert bool(((decoded - values).abs()[:4096] < 2e-5).all())
    assert bool((round_trip(MinMaxUInt8(None), values)[:4096] == 0).all())


def test_values_of_half_precision_decode_into_floats() -> None:
    values = samples("normal", 1001, torch.bfloat16)
    payload = compressed(MinMaxUInt8(), values)
    decoded = decompressed(MinMaxUInt8(), payload, values.float())
    assert torch.equal(decoded.bfloat16(), decompressed(MinMaxUInt8(), payload, values))


def test_payload_bytes_of_eight_bits() -> None:
    assert MinMaxUInt8().payload_bytes(0, torch.float32) == 0
    assert MinMaxUInt8().payload_bytes(4096, torch.float16) == 4096 + 8
    assert MinMaxUInt8().payload_bytes(4097, torch.bfloat16) == 4097 + 16
    assert MinMaxUInt8().payload_bytes(4097, torch.float64) == 4097 + 32
    assert MinMaxUInt8(None).payload_bytes(10**6, torch.float32) == 10**6 + 8


@pytest.mark.parametrize("block_size", [0, -1, 2.5, "4096", True])
def test_a_block_size_that_is_none_is_refused(block_size: object) -> None:
    with pytest.raises(ConfigError, match="is not a number of elements"):
        MinMaxUInt8(block_size)  # type: ignore[arg-type]


# Cast


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cast_is_a_change_of_dtype(dtype: torch.dtype, target: torch.dtype) -> None:
    if not takes(Cast(target), dtype):
        with pytest.raises(UsageError, match="would not make"):
            Cast(target).payload_bytes(1, dtype)
        return
    for kind in KINDS:
        values = samples(kind, 1001, dtype)
        for offset in (0, 1, 2):
            payload = compressed(Cast(target), values, offset)
            assert payload.numel() == 1001 * target.itemsize
            assert same(decompressed(Cast(target), payload, values), values.to(target).to(dtype)), kind


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.uint8, torch.complex64, "bfloat16", None])
def test_a_cast_to_nonsense_is_refused(dtype: object) -> None:
    with pytest.raises(ConfigError, match="name one of"):
        Cast(dtype)  # type: ignore[arg-type]


# ErrorFeedback


@pytest.mark.parametrize("inner", [MinMaxUInt8(100), Cast(torch.bfloat16)], ids=repr)
def test_nothing_is_lost_for_long(inner: Compressor) -> None:
    """What was sent so far and the residual make what was to be sent: on whole numbers, exactly."""
    feedback = ErrorFeedback(inner).for_bucket()
    sent, given = torch.zeros(1001, dtype=torch.float64), torch.zeros(1001, dtype=torch.float64)
    for step in range(30):
        values = samples("normal", 1001, torch.float64, step)
        feedback.decompress_add(compressed(feedback, values), sent)
        given += values
    residual = feedback.state_dict()["residual"]
    assert torch.allclose(sent + residual, given, rtol=0, atol=1e-12)
    alone = torch.zeros(1001, dtype=torch.float64)
    for step in range(30):
        alone += round_trip(inner, samples("normal", 1001, torch.float64, step))
    assert (sent - given).abs().mean() < (alone - given).abs().mean()


def test_the_residual_is_what_was_lost() -> None:
    feedback = ErrorFeedback(MinMaxUInt8(100)).for_bucket()
    values = samples("normal", 1001, torch.float32)
    lost = values - round_trip(feedback, values)
    assert torch.equal(feedback.state_dict()["residual"], lost)
    assert torch.equal(compressed(feedback, values), compressed(MinMaxUInt8(100), values + lost))


def test_an_overflow_is_forgotten() -> None:
    feedback = ErrorFeedback(MinMaxUInt8(100)).for_bucket()
    round_trip(feedback, samples("an infinity", 1001, torch.float32))
    assert bool(feedback.state_dict()["residual"].isfinite().all())
    assert bool(round_trip(feedback, samples("normal", 1001, torch.float32)).isfinite().all())


def test_each_bucket_has_its_own_residual() -> None:
    prototype = ErrorFeedback(MinMaxUInt8())
    first, second = prototype.for_bucket(), prototype.for_bucket()
    compressed(first, samples("normal", 10, torch.float32))
    compressed(second, samples("normal", 20, torch.float32))
    assert prototype.state_dict()["residual"] is None
    assert first.state_dict()["residual"].numel() == 10


def test_a_resumed_run_continues_to_the_bit() -> None:
    values = [samples("normal", 1001, torch.float32, seed) for seed in range(6)]
    through = ErrorFeedback(MinMaxUInt8()).for_bucket()
    for each in values[:3]:
        compressed(through, each)
    state = through.state_dict()
    resumed = ErrorFeedback(MinMaxUInt8()).for_bucket()
    for each in values[3:]:
        expected = compressed(through, each)  # does not reach into what was saved
        assert math.isfinite(expected.float().mean())
    resumed.load_state_dict(state)
    again = [compressed(resumed, each) for each in values[3:]]
    assert torch.equal(again[-1], expected)
    resumed.load_state_dict(state)  # nor does going on from it
    assert torch.equal(compressed(resumed, values[3]), again[0])


@pytest.mark.parametrize("other", [torch.zeros(11), torch.zeros(10, dtype=torch.float64)], ids=["length", "dtype"])
def test_a_residual_of_other_tensors_is_not_added(other: Tensor) -> None:
    feedback = ErrorFeedback(MinMaxUInt8()).for_bucket()
    compressed(feedback, torch.zeros(10))
    with pytest.raises(UsageError, match=r"holds what 10 x torch.float32 lost.*for_bucket"):
        compressed(feedback, other)


@pytest.mark.parametrize("inner", [None, MinMaxUInt8, ErrorFeedback(MinMaxUInt8())], ids=str)
def test_feedback_around_nonsense_is_refused(inner: object) -> None:
    with pytest.raises(ConfigError, match=r"Wrap|Write"):
        ErrorFeedback(inner)  # type: ignore[arg-type]
