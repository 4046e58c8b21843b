"""`murmura bench c10d` from its options to its table and file, on tiny sizes; no speed is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from murmura import ConfigError, Transport, run_world
from murmura.tools.bench import c10d, c10d_contestants
from murmura.tools.bench.c10d import C10dSpec, Stage, run_c10d
from murmura.tools.bench.c10d_contestants import OPERATIONS
from murmura.tools.cli import bench
from murmura.tools.cli.main import app


@pytest.mark.slow
def test_every_call_is_measured_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quick = C10dSpec(sizes_bytes=(4096,), seconds=0.05, steps=False)
    monkeypatch.setattr(bench, "C10dSpec", lambda **options: quick)
    target = tmp_path / "result.json"
    result = CliRunner().invoke(app, ["bench", "c10d", "--against", "gloo", "--json", str(target)])
    assert result.exit_code == 0, result.output
    assert "reduce_scatter_tensor, 4 KiB" in result.stdout
    told = json.loads(target.read_text())
    found = {(row["operation"], row["contestant"]) for row in told["rows"]}
    names = ("murmura", "murmura new tensors", "murmura allocated", "gloo")
    assert found == {(operation, name) for operation in OPERATIONS for name in names}
    for row in told["rows"]:
        assert row["microseconds"] > 0
        assert (row["ratio"] is None) == (row["contestant"] == "gloo")


def addresses(transport: Transport) -> dict[str, list[int]]:
    """Where the tensors of each contestant's all-reduces lie, over some batches."""
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d_contestants.dist, "all_reduce", lambda tensor, group: seen.append(tensor.data_ptr()))
        patch.setattr(c10d_contestants, "_check", lambda *args: None)
        contestants = c10d_contestants.prepare_calls(transport, {"gloo": None, "murmura": Group()}, "all_reduce", 4096)
        told = {}
        for each in contestants:
            each.batch = 3
            seen.clear()
            for number in range(100):
                each.run_batch(number)
            told[each.name] = list(seen)
    return told


class Group:
    def allocate_tensor(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(length, dtype=dtype)


def test_new_tensors_are_new_in_each_batch() -> None:
    (told,) = run_world(addresses, 1)
    assert len(told["murmura new tensors"]) == len(set(told["murmura new tensors"])) == 300
    assert len(set(told["murmura"])) < 100


@pytest.mark.slow
def test_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "STEPS", (("DDP step", 4), ("FSDP2 step", 4)))
    report = run_c10d(C10dSpec(sizes_bytes=(), seconds=0.1))
    assert set(report.rows_of(Stage("FSDP2 step", 4))) == {"murmura", "gloo", "bare"}


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nobody to exchange with(.|\n)*multiple of 4"):
        C10dSpec(ranks=1, sizes_bytes=(3,))
    refused = CliRunner().invoke(app, ["bench", "c10d", "--against", "mpich"])
    assert refused.exit_code != 0
    assert "--against='mpich' is unknown" in refused.output
