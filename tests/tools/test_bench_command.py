"""`murmura bench all-reduce` from its options to its table and file, on tiny sizes; no speed is asserted."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from forked import module, run_forked
from murmura import ConfigError, MurmuraError, __version__, run_world
from murmura.tools.bench import mpiexec
from murmura.tools.bench.all_reduce import AllReduceReport, AllReduceSpec, report_of
from murmura.tools.bench.all_reduce_contestants import Peer
from murmura.tools.bench.harness import Sample
from murmura.tools.cli import bench
from murmura.tools.cli.bench_tables import all_reduce_table
from murmura.tools.cli.main import app
from murmura.tools.cli.output import MIN_COLUMNS, digits

EXAMPLES = Path(__file__).parents[2] / "examples"
MURMURA = ("murmura allocated", "murmura any tensor")
QUICK = ("--sizes", "4KiB,512KiB", "--seconds", "0.05")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "all-reduce", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def mpich_is_missing() -> str:
    try:
        mpiexec.find_mpiexec()
    except ConfigError as error:
        return str(error)
    return ""


def check_file(path: Path, peers: set[str]) -> None:
    told = json.loads(path.read_text(encoding="utf-8"))
    found = {(row["size_bytes"], row["contestant"]) for row in told["rows"]}
    assert found == {(size, name) for size in (4096, 512 * 1024) for name in (*MURMURA, *peers)}
    for row in told["rows"]:
        first, third = row["quartiles"]
        assert 0 < first <= row["microseconds"] <= third
        assert row["gb_per_s"] == pytest.approx(row["size_bytes"] / row["microseconds"] / 1000)
        assert set(row["ratio"]) == (peers if row["contestant"] in MURMURA else set())


def test_gloo_is_measured_beside_murmura(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    status, table, progress = run(*QUICK, "--json", str(file))
    assert status == 0
    check_file(file, {"gloo"})
    assert "x Gloo" in table
    assert "512 KiB" in table
    assert str(file) in table
    assert "gloo: ProcessGroupGloo of torch" in table, "what each contestant was"
    assert re.fullmatch(r"4 KiB: \d+ rounds\n512 KiB: \d+ rounds\n", progress)


@pytest.mark.skipif(bool(mpich_is_missing()), reason=mpich_is_missing() or "MPICH is there")
def test_mpich_and_gloo_are_measured_in_one_run(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    status, table, _ = run(*QUICK, "--against", "gloo", "--against", "mpich", "--json", str(file))
    assert status == 0
    check_file(file, {"gloo", "mpich"})
    assert "x MPICH" in table


@pytest.mark.skipif(bool(mpich_is_missing()), reason=mpich_is_missing() or "MPICH is there")
def test_a_rank_that_fails_under_mpiexec_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MURMURA_TRANSPORT", "in_process")  # cannot join processes, so every rank refuses
    status, _, error = run(*QUICK, "--against", "mpich")
    assert status == 1
    assert "transport='in_process'" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "4KB"), "'4KB': 'KB' is not a unit of size here. Write 4KiB."),
        (("--sizes", "6"), "6 bytes are no whole number of float32 elements"),
        (("--against", "nccl"), "--against='nccl' is unknown. Known: 'gloo', 'mpich'."),
        (("--ranks", "1"), "Ask for 2 or more"),
        (("--ranks", "two"), "'--ranks'"),
        (("--seconds", "0"), "Give seconds above 0"),
        (("--json", "/nowhere/result.json"), "there is no folder /nowhere"),
        (("--json", str(EXAMPLES)), "is a folder. Name a file in it"),
        (("--sizes", "100000GiB"), "GiB are available"),
    ],
)
def test_bad_input_is_told_before_anything_starts(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("murmura.tools.ranks.run_world", None)
    status, _, error = run(*arguments)
    assert status == 2
    assert message in re.sub(r"\s+", " ", error)
    assert "Traceback" not in error


def test_a_failure_is_one_message_and_another_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: AllReduceSpec, on_progress: object) -> AllReduceReport:
        raise MurmuraError("rank 1 was killed.\nIts peers noticed.")

    monkeypatch.setattr(bench, "run_all_reduce", fail)
    assert run() == (1, "", "error: rank 1 was killed.\n       Its peers noticed.\n")


def test_help_teaches() -> None:
    status, text, _ = run("--help")
    assert status == 0
    for word in ("--ranks", "--sizes", "--against", "--seconds", "--json", "mpich", "For example"):
        assert word in text


def test_the_version_is_told() -> None:
    done = run_forked(module, ["murmura", "--version"])
    assert done.stdout == f"murmura {__version__}\n"
    assert CliRunner().invoke(installed_command(), ["--version"]).stdout == done.stdout


def installed_command() -> typer.Typer:
    """What `pip install` makes of the command, by pyproject.toml."""
    scripts = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, name = scripts["murmura"].partition(":")
    found: typer.Typer = getattr(importlib.import_module(module), name)
    return found


def test_the_table_has_a_row_a_size_and_tells_who_is_faster() -> None:
    microseconds = {"murmura allocated": 4.0, "murmura any tensor": 8.0, "gloo": 1600.0, "mpich": 4.4}
    samples = [Sample(name, "made up", 1, [[[each * 1e-6]] * 5]) for name, each in microseconds.items()]
    spec = AllReduceSpec(sizes_bytes=(4096, 2**20), peers=(Peer.GLOO, Peer.MPICH))
    report = report_of(spec, dict.fromkeys(spec.sizes_bytes, samples), 0.5)
    with open(os.devnull, "w") as nowhere:
        console = Console(width=MIN_COLUMNS, record=True, file=nowhere)
        console.print(all_reduce_table(report))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "4 KiB 4.00 8.00 1600 4.40 1.02 400 / 200 1.10 / 0.55" in lines
    assert "1 MiB 4.00 8.00 1600 4.40 262 400 / 200 1.10 / 0.55" in lines


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.12"), (4.567, "4.57"), (78.94, "78.9"), (153.2, "153"), (25159.4, "25159")]
)
def test_numbers_show_the_digits_that_count(value: float, text: str) -> None:
    assert digits(value) == text


def test_the_example_of_four_ranks_averages_and_trains_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("four_ranks")
    assert [mean.tolist() for mean in run_world(example.average, 4, kind="processes")] == [[2.5, 2.5, 2.5]] * 4
    losses, weights = zip(*run_world(example.train, 4, kind="processes"), strict=True)
    assert losses[0][-1] < losses[0][0] / 2
    assert all(torch.equal(theirs, weights[0]) for theirs in weights)


@pytest.mark.slow  # four new processes, each of which imports torch's compiler
def test_the_example_of_four_ranks_runs() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "four_ranks.py"], capture_output=True, text=True, check=True)
    assert "rank 3 had 4s; the mean of all ranks is [2.5, 2.5, 2.5]" in done.stdout
    assert "bit-equal on all four ranks" in done.stdout
