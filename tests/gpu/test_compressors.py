"""Compressors on CUDA: the same bytes and the same values as on the CPU, from the kernels and from plain operations.

Run on a machine with a GPU: ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import murmura
from contracts.values import DTYPES, KINDS, samples
from murmura.compressors import cast, minmax, minmax_plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

QUANTISERS = [
    *(murmura.MinMaxUInt8(size) for size in (1, 64, 100, 4096, 20_000, None)),
    *(murmura.MinMaxUInt4(size) for size in (2, 100, 256, 20_000)),
]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, but for the bits of a NaN."""
    return torch.equal(a.cpu().nan_to_num(nan=12.5), b.cpu().nan_to_num(nan=12.5)) and torch.equal(
        a.cpu().isnan(), b.cpu().isnan()
    )


def space(num_bytes: int, offset: int, device: str) -> Tensor:
    return torch.full((num_bytes + offset,), 7, dtype=torch.uint8, device=device)[offset:]


def round_trip(compressor: murmura.Compressor, values: Tensor, device: str, offset: int) -> list[Tensor]:
    """The payload, what it decodes to, and what adding it makes of ones."""
    payload = space(compressor.payload_bytes(values.numel(), values.dtype), offset, device)
    compressor.compress(values.to(device), payload)
    decoded = torch.empty_like(values, device=device)
    compressor.decompress(payload, decoded)
    added = torch.ones_like(decoded)
    compressor.decompress_add(payload, added)
    return [payload, decoded, added]


def test_triton_is_used() -> None:
    assert minmax._cuda_kernels(torch.device("cuda", 0)).__name__.endswith("minmax_triton")


@pytest.mark.parametrize("kernels", ["triton", "plain"])
@pytest.mark.parametrize("compressor", QUANTISERS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_gives_the_bits_of_the_cpu(
    dtype: torch.dtype, compressor: murmura.Compressor, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "plain":
        monkeypatch.setattr(minmax, "_cuda_kernels", lambda device: minmax_plain)
    for kind in KINDS:
        for length in (1, 2, 3, 4096, 10_007):
            values = samples(kind, length, dtype)
            for offset in (0, 1):
                expected = round_trip(compressor, values, "cpu", offset)
                found = round_trip(compressor, values, "cuda", offset)
                told = f"{kind}, {length} elements, offset {offset}"
                assert torch.equal(found[0].cpu(), expected[0]), f"payload: {told}"
                assert same(found[1], expected[1]), f"decoded: {told}"
                assert same(found[2], expected[2]), f"added: {told}"


@pytest.mark.parametrize("kernels", ["triton", "plain"])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_on_cuda_gives_the_bits_of_the_cpu(
    dtype: torch.dtype, target: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressor = murmura.Cast(target)
    if dtype != target and dtype.itemsize <= target.itemsize:
        pytest.skip("it would not become smaller")
    if kernels == "plain":
        monkeypatch.setattr(cast, "_cuda_kernels", lambda device: None)
    else:
        assert cast._cuda_kernels(torch.device("cuda", 0)) is not None
    for kind in KINDS:
        for length in (0, 1, 3, 4096, 10_007):
            values = samples(kind, length, dtype) if length else torch.empty(0, dtype=dtype)
            for offset in (0, 1, 2):
                expected = round_trip(compressor, values, "cpu", offset)
                found = round_trip(compressor, values, "cuda", offset)
                told = f"{kind}, {length} elements, offset {offset}"
                as_values = [each[0].clone().view(target) for each in (found, expected)]
                assert same(*as_values), f"payload: {told}"
                assert same(found[1], expected[1]), f"decoded: {told}"
                assert same(found[2], expected[2]), f"added: {told}"


AT_ONCE = [murmura.MinMaxUInt8(64), murmura.MinMaxUInt8(), murmura.Cast(torch.bfloat16)]


@pytest.mark.parametrize("compressor", AT_ONCE, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_parts_at_once_give_the_bits_of_the_cpu(dtype: torch.dtype, compressor: murmura.Compressor) -> None:
    """Means of numbers of ranks that are no powers of two too: kernels divide, where torch multiplies on CUDA."""
    assert minmax._cuda_part_kernels(torch.device("cuda", 0)) is not None
    if isinstance(compressor, murmura.Cast) and dtype == torch.float16:
        pytest.skip("it would not become smaller")
    for kind, (numel, num_parts) in itertools.product(KINDS, [(3, 2), (65_536, 2), (65_537, 3)]):
        values = samples(kind, numel, dtype)
        found, expected = (results_at_once(compressor, values.to(device), num_parts) for device in ("cuda", "cpu"))
        for what, one, other in zip(("payload", "decoded", "mean", "sum"), found, expected, strict=True):
            if isinstance(compressor, murmura.Cast) and one.dtype == torch.uint8:  # a NaN has many bits
                one, other = one.view(compressor.dtype), other.view(compressor.dtype)
            assert same(one, other), f"{what}: {kind}, {numel} elements, {num_parts} parts"


def results_at_once(compressor: murmura.Compressor, values: Tensor, num_parts: int) -> list[Tensor]:
    """The payloads of the parts, what they decode to, and the payloads of a mean and of a sum."""
    numel, dtype, device = values.numel(), values.dtype, str(values.device)
    sizes = [compressor.payload_bytes(part.numel(), dtype) for part in values.tensor_split(num_parts)]
    payload, decoded = space(sum(sizes), 0, device), torch.empty_like(values)
    compressor.compress_parts(values, num_parts, payload)
    compressor.decompress_parts(payload, num_parts, decoded)
    wide = dtype if dtype.itemsize > 2 else torch.float32
    rows = torch.stack([compressor.encode(values * (row + 1)) for row in range(num_parts)])
    found = [payload, decoded]
    for divisor in (num_parts, 1):
        found.append(space(compressor.payload_bytes(numel, wide), 0, device))
        compressor.compress_mean(rows, divisor, torch.empty(numel, dtype=wide, device=device), found[-1])
    return found


@pytest.mark.parametrize(
    "compressor", [murmura.Cast(torch.bfloat16), murmura.MinMaxUInt8(), murmura.MinMaxUInt4()], ids=repr
)
def test_error_feedback_on_cuda_is_that_of_the_cpu(compressor: murmura.Compressor) -> None:
    results = []
    for device in ("cpu", "cuda"):
        feedback = murmura.ErrorFeedback(compressor)
        payload = space(feedback.payload_bytes(5000, torch.float32), 0, device)
        for step in range(3):
            feedback.compress(samples("normal", 5000, torch.float32).to(device) * (step + 1), payload)
        results.append((payload.cpu(), feedback.state_dict()["residual"].cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


FEW_BITS = [murmura.TopK(0.1), murmura.RandomK(0.1), murmura.Sign(64), murmura.TopKTwoBit(64, 8)]


@pytest.mark.parametrize("compressor", FEW_BITS, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_payload_of_the_gpu_decodes_to_the_same_bits_everywhere(
    compressor: murmura.Compressor, dtype: torch.dtype
) -> None:
    for length in (1, 64, 10_007):
        values = samples("normal", length, dtype).to("cuda")
        payload = compressor.encode(values)
        here, there = torch.empty_like(values), torch.empty_like(values, device="cpu")
        compressor.decompress(payload, here)
        compressor.decompress(payload.cpu(), there)
        assert torch.equal(here.cpu(), there)
        compressor.decompress_add(payload, here)
        compressor.decompress_add(payload.cpu(), there)
        assert torch.equal(here.cpu(), there)


def test_work_is_queued_on_the_current_stream() -> None:
    compressor = murmura.MinMaxUInt8()
    values = torch.zeros(2**22, device="cuda")
    payload = space(compressor.payload_bytes(values.numel(), values.dtype), 0, "cuda")
    out = torch.empty_like(values)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        values.fill_(3.0)
        compressor.compress(values, payload)
        compressor.decompress(payload, out)
    torch.cuda.synchronize()
    assert bool((out == 3.0).all())


@pytest.mark.parametrize("compressor", [murmura.MinMaxUInt8(), murmura.MinMaxUInt4()], ids=repr)
def test_more_than_two_billion_elements(compressor: murmura.Compressor) -> None:
    numel = 2**31 + 4096 + 5
    values = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    last = values[2**31 :]  # where blocks begin, so that these alone have the same codes
    last[-5:] = torch.arange(1.0, 6.0, device="cuda")
    last[0] = 240.0
    payload = space(compressor.payload_bytes(numel, values.dtype), 0, "cuda")
    compressor.compress(values, payload)
    out = torch.ones_like(values)
    compressor.decompress(payload, out)
    assert torch.equal(out[2**31 :], round_trip(compressor, last.clone(), "cuda", 0)[1])
    assert int(out[: 2**31].count_nonzero()) == 0
    assert int(out.count_nonzero()) == 6


def test_threads_may_be_the_first_to_compile() -> None:
    compressor = murmura.MinMaxUInt8(768)  # a shape that no other test has asked for
    values = samples("normal", 10_007, torch.float32)
    expected = round_trip(compressor, values, "cpu", 0)

    def work(transport: murmura.Transport) -> bool:
        found = round_trip(compressor, values, "cuda", 0)
        return all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))

    assert all(murmura.run_world(work, 4, timeout=120))
