"""Many payloads at once: the bytes and values of one after another."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from contracts.values import DTYPES, samples
from murmura import Cast, Compressor, ErrorFeedback, MinMaxUInt4, MinMaxUInt8, Sign

COMPRESSORS = [MinMaxUInt8(64), MinMaxUInt8(None), MinMaxUInt4(), Sign(64), Cast(torch.bfloat16)]


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize(("numel", "num_parts"), [(0, 2), (2, 3), (1001, 1), (1001, 3), (1024, 4)])
def test_parts_are_those_of_chunks_end_to_end(compressor: Compressor, numel: int, num_parts: int) -> None:
    values = samples("normal", numel, torch.float32) if numel else torch.empty(0)
    payloads = [compressor.encode(part) for part in values.tensor_split(num_parts)]
    payload = torch.empty(sum(map(len, payloads)), dtype=torch.uint8)
    compressor.compress_parts(values, num_parts, payload)
    assert torch.equal(payload, torch.cat(payloads))
    out, expected = torch.empty_like(values), torch.empty_like(values)
    ErrorFeedback(compressor).decompress_parts(payload, num_parts, out)
    for part, its_payload in zip(expected.tensor_split(num_parts), payloads, strict=True):
        compressor.decompress(its_payload, part)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
@pytest.mark.parametrize("dtype", [each for each in DTYPES if each != torch.float16], ids=str)
def test_a_mean_is_the_sum_in_the_order_of_the_rows_divided(compressor: Compressor, dtype: torch.dtype) -> None:
    wide = dtype if dtype.itemsize > 2 else torch.float32
    rows = [compressor.encode(samples("normal", 203, dtype, seed)) for seed in range(3)]
    total = torch.zeros(203, dtype=wide)
    for row in rows:
        decoded = torch.empty_like(total)
        compressor.decompress(row, decoded)
        total += decoded
    found = torch.empty(compressor.payload_bytes(203, wide), dtype=torch.uint8)
    compressor.compress_mean(torch.stack(rows), 3, torch.empty_like(total), found)
    assert torch.equal(found, compressor.encode(total / 3))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, and no GPU")
def test_kernels_of_many_parts_give_the_bits_of_the_cpu() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "contracts.interpreted_kernels"]
    folder = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
