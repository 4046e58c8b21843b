"""`murmura bench compressors` from its options to its table and file, on small tensors; no speed is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from murmura import MinMaxUInt8
from murmura.compressors import compressor_named, compressor_names
from murmura.tools.bench import compressors
from murmura.tools.cli.main import app


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "compressors", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_every_operation_is_measured_beside_a_copy(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    threads = torch.get_num_threads()
    status, table, progress = run("--size", "1MiB", "--cuda-size", "1MiB", "--seconds", "0.05", "--json", str(file))
    assert status == 0
    assert progress.startswith("cpu: ")
    assert "x copy" in table
    assert str(file) in table
    assert torch.get_num_threads() == threads
    told = json.loads(file.read_text(encoding="utf-8"))
    rows = [row for row in told["rows"] if row["device"] == "cpu"]
    operations = {(row["compressor"], row["operation"]) for row in rows}
    names = ["uint8", "bf16", "uint4"]
    assert operations == {("copy", "copy")} | {(n, o) for n in names for o in ("encode", "decode", "decode-add")}
    copy = rows[0]
    assert (copy["times_copy"], copy["of_copy_bandwidth"], copy["least_bytes"]) == (1, 1, 2 * 2**20)
    for row in rows:
        first, third = row["quartiles"]
        assert 0 < first <= row["microseconds"] <= third
        assert row["times_copy"] == pytest.approx(row["microseconds"] / copy["microseconds"])
        speed, copied = (each["least_bytes"] / each["microseconds"] for each in (row, copy))
        assert row["of_copy_bandwidth"] == pytest.approx(speed / copied)
    encode, decode, decode_add = rows[1:4]
    payload = MinMaxUInt8().payload_bytes(2**18, torch.float32)
    assert encode["least_bytes"] == decode["least_bytes"] == 2**20 + payload
    assert decode_add["least_bytes"] == 2 * 2**20 + payload
    uint4 = compressor_named("uint4")
    assert told["contestants"]["uint4"] == repr(uint4)
    with_feedback = rows[7]["least_bytes"]  # what was lost is read and written
    assert with_feedback == 3 * 2**20 + uint4.payload_bytes(2**18, torch.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_tensors_of_other_dtypes(tmp_path: Path, dtype: str) -> None:
    file = tmp_path / "result.json"
    options = ("--dtype", dtype, "--size", "1MiB", "--cuda-size", "1MiB", "--seconds", "0.01", "--json", str(file))
    status, table, _ = run("--compressors", "uint8", *options)
    assert status == 0
    assert f"compressors, {dtype}" in table
    told = json.loads(file.read_text(encoding="utf-8"))
    assert told["dtype"] == dtype
    of = getattr(torch, dtype)
    payload = MinMaxUInt8().payload_bytes(2**20 // of.itemsize, of)
    assert [row["least_bytes"] for row in told["rows"][:2]] == [2 * 2**20, 2**20 + payload]


def test_every_compressor_of_the_registry_can_be_measured(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    names = [*compressor_names(), "topk:ratio=0.05", "uint4:feedback=false"]
    options = ("--size", "16KiB", "--cuda-size", "16KiB", "--seconds", "0.01", "--json", str(file))
    status, _, _ = run("--compressors", ",".join(names), *options)
    assert status == 0
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert list(dict.fromkeys(row["compressor"] for row in rows)) == ["copy", *names]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "4KB"), "'4KB': 'KB' is not a unit of size here"),
        (("--size", "3"), "3 bytes are no whole number of float32 elements"),
        (("--cuda-size", "0"), "0 bytes are no whole number of float32 elements"),
        (("--size", "4", "--dtype", "float64"), "4 bytes are no whole number of float64 elements"),
        (("--dtype", "int8"), "--dtype='int8' is unknown. Known: 'float16', 'bfloat16', 'float32', 'float64'."),
        (("--seconds", "0"), "is not a time to measure for"),
        (("--compressors", "uint8,uint3"), "compressor='uint3' is unknown. Known: 'bf16'"),
        (("--compressors", "topk:share=0.1"), "'topk' has no option 'share'"),
        (("--compressors", ""), "compressor='' is unknown"),
        (("--json", "/no/such/folder/file.json"), "/no/such/folder"),
    ],
)
def test_a_bad_option_is_told_plainly(arguments: tuple[str, ...], message: str) -> None:
    status, _, error = run(*arguments)
    assert status != 0
    assert message in " ".join(error.split())


def test_a_compressor_that_decodes_wrongly_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(MinMaxUInt8):
        def decompress(self, payload: Tensor, out: Tensor) -> None:
            out.zero_()

    monkeypatch.setattr(compressors, "compressor_named", lambda name: Forgetful())
    status, _, error = run("--size", "4KiB", "--seconds", "0.05")
    assert status == 1
    assert "decoded wrongly on cpu" in " ".join(error.split())
