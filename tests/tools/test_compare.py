"""`murmura compare` from its options to its table, report and file; and what its rows and sentences are made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from contracts.grids import grid
from murmura import DDP, Algorithm, ConfigError, TracedTransport, Transport, UsageError, run_world
from murmura.algorithms import (
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    Phased,
    algorithm_named,
    algorithm_names,
)
from murmura.algorithms.qadam import WARMUP_SHARE
from murmura.compressors import Cast, MinMaxUInt8
from murmura.observe import Record
from murmura.tools.cli.main import app
from murmura.tools.cli.output import digits
from murmura.tools.experiments import comparison as comparing
from murmura.tools.experiments import report as reports
from murmura.tools.experiments.compare_rank import use_kernels
from murmura.tools.experiments.compare_spec import BLOCK_STEPS, TORCH_DDP, ComparisonSpec
from murmura.tools.experiments.comparison import Row, common_target, contradictions, recommendation, row_of
from murmura.tools.experiments.recipes import configuration, optimizer_for, parse_algorithms
from murmura.tools.experiments.runs import Run, only_writer
from tools.lab.conditions import needs_namespaces
from worlds import SECONDS, ExchangeOnly


def run(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def small(folder: Path, links: str, steps: int = BLOCK_STEPS) -> tuple[str | Path, ...]:
    options = ("--task", "mlp", "--algorithms", "gradient_allreduce,shift_one", "--ranks", "2")
    return (*options, "--steps", str(steps), "--bandwidth", links, "--out", folder)


def told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_local_ranks_are_compared_with_torchs_ddp(tmp_path: Path) -> None:
    folder = tmp_path / "comparison"
    status, shown, progress = run(*small(folder, "local", 2 * BLOCK_STEPS), "--json", tmp_path / "result.json")
    assert status == 0
    assert "local: 2 rounds" in progress
    assert shown.splitlines()[-1] == f"report  {folder / 'report.html'}"
    for words in ("torch DDP", "gradient_allreduce", "shift_one", "shared memory", "within this machine use"):
        assert words in shown
    result = told(tmp_path)
    rows = {row["contestant"]: row for row in result["rows"]}
    assert list(rows) == ["torch DDP", "gradient_allreduce", "shift_one"]
    # Two ranks: the mean of two numbers is rounded once, so that torch's DDP comes to the very same loss.
    assert rows["torch DDP"]["final_loss"] == rows["gradient_allreduce"]["final_loss"]
    assert rows["shift_one"]["consensus_distance"] > 0 == rows["gradient_allreduce"]["consensus_distance"]
    assert rows["gradient_allreduce"]["step_bytes"] == pytest.approx(rows["torch DDP"]["step_bytes"], rel=0.01)
    for row in rows.values():
        assert row["steps_to_target"] in (20, 40)
        assert 0 < row["seconds_to_target"] <= 40 * 1000
        assert row["step_ms"] > 0
    page = (folder / "report.html").read_text()
    check_one_statistic(folder, rows, page)
    for name in ("gradient_allreduce", "shift_one"):
        assert f"{name}: {configuration(name, 40)}" in shown
        assert result["configurations"][name].startswith(configuration(name, 40))
    assert result["recommendations"]["local"].split(":")[0] in page
    assert page.count("<svg") == 4 + 2 * 2 + 1  # torch's steps are not split
    found = Run.read(folder / "local" / "shift_one")
    assert [len(records) for records in found.records.values()] == [40, 40]
    assert not list(folder.glob(".*"))


def check_one_statistic(folder: Path, rows: dict[str, Any], page: str) -> None:
    """The bar of each contestant is as long as the table says its step is."""
    for name, row in rows.items():
        found = Run.read(folder / "local" / name.replace(" ", "-"))
        assert sum(reports._parts(found)) == pytest.approx(row["step_ms"])
        assert f"<td>{digits(row['step_ms'])}</td>" in page


def test_without_namespaces_a_throttled_transport_stands_in_and_the_table_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(n: int, rate: str) -> None:
        raise UsageError("simulated hosts need root.")

    monkeypatch.setattr(comparing, "Hosts", refuse)
    status, shown, _ = run(*small(tmp_path / "comparison", "4mbit"), "--json", tmp_path / "result.json")
    assert status == 0
    words = " ".join(shown.split())
    assert "Link: ThrottledTransport, so torch's DDP is not compared. (simulated hosts need root.)" in words
    rows = told(tmp_path)["rows"]
    assert [row["contestant"] for row in rows] == ["gradient_allreduce", "shift_one"]
    assert all(row["step_ms"] > row["formula_bytes"] * 8 / 4e6 * 1000 for row in rows)


@pytest.mark.slow
@needs_namespaces
def test_hosts_stand_for_a_named_rate(tmp_path: Path) -> None:
    status, shown, _ = run(*small(tmp_path / "comparison", "100mbit"), "--json", tmp_path / "result.json")
    assert status == 0
    assert "Gloo between hosts in network namespaces" in " ".join(shown.split())
    rows = {row["contestant"]: row for row in told(tmp_path)["rows"]}
    assert list(rows) == ["torch DDP", "gradient_allreduce", "shift_one"]
    for row in rows.values():  # counted by the kernel, with headers
        assert row["step_bytes"] == pytest.approx(row["formula_bytes"], rel=0.2)


@needs_namespaces
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_step_times_at_100_mbit_come_in_the_order_of_the_byte_formulas(tmp_path: Path) -> None:
    options = ("--task", "charlm", "--ranks", "4", "--bandwidth", "100mbit", "--steps", "80", "--algorithms", "all")
    assert run(*options, "--out", tmp_path / "comparison", "--json", tmp_path / "result.json")[0] == 0
    rows = [Row(**row) for row in told(tmp_path)["rows"]]
    assert len(rows) == len(algorithm_names()) + 1
    assert contradictions(rows) == []
    for row in rows:
        # Counted over all steps, with those in which QAdam warms up: then it sends four times as much.
        share = WARMUP_SHARE if row.contestant == "qadam" else 0
        # To each other rank, the tail of thirty parameters, and 144 bytes that Gloo puts before each of five messages.
        beside = 3 * (8 * (30 + 2) + 5 * 144) if row.contestant == "powersgd" else 0
        assert row.step_bytes == pytest.approx(row.formula_bytes * (1 + 3 * share) + beside, rel=0.12)


# The formulas


def sent_per_step(transport: Transport, name: str, steps: int) -> float:
    traced = TracedTransport(transport)
    model = nn.Sequential(nn.Linear(256, 255, bias=False))
    ddp = DDP(model, ExchangeOnly(traced), algorithm=algorithm_named(name), broadcast_buffers=False)
    optimizer = optimizer_for(name, ddp.parameters(), 1e-3, steps)
    before = 0
    for step in range(2 * steps):
        if step == steps:  # whatever settles at the beginning, and QAdam's warm-up, are over
            before = sum(each.sent_bytes for each in traced.operations)
        optimizer.zero_grad()
        ddp(torch.ones(1, 256)).sum().backward()
        optimizer.step()
    ddp.close()
    transport.barrier()
    return (sum(each.sent_bytes for each in traced.operations) - before) / steps


CHOICES = [f"gradient_allreduce:compressor={name}" for name in ("topk", "randomk", "sign", "uint4", "majority_vote")]
CHOICES += ["qadam:compressor=sign", "local_sgd:average_moments=true", "diloco:average_moments=true"]


@grid("name, size", [*algorithm_names(), *CHOICES], [2, 4], sample=2)
def test_every_algorithm_sends_what_its_formula_says(name: str, size: int) -> None:
    sent = run_world(sent_per_step, size, name, 20, timeout=SECONDS)
    formula = algorithm_named(name).bytes_per_round([[255, 256]], size)
    if name == "powersgd":  # messages so short go to all ranks at once
        formula = formula * size / 2
    if name == "powersgd" or name in CHOICES[:5]:  # the tail of one parameter is no small part of what is sent
        formula += 8 * (1 + 2) * (size - 1)
    if name.endswith("=randomk"):  # each chunk begins with the number of its draw, where the formula counts one message
        formula += 8 * 2 * (size - 1) * (1 - 1 / size)
    assert sum(sent) / size == pytest.approx(formula, rel=0.01)


def test_a_formula_counts_the_compressor_and_is_refused_where_the_run_decides() -> None:
    whole = GradientAllReduceAlgorithm().bytes_per_round(1000, 4)
    assert whole == 1.5 * 4000
    assert GradientAllReduceAlgorithm(compressor=Cast(torch.bfloat16)).bytes_per_round(1000, 4) == whole / 2
    assert DiLoCoAlgorithm(10, compressor=Cast(torch.bfloat16)).bytes_per_round(1000, 4) == whole / 20
    by_the_clock = AsyncModelAverageAlgorithm()
    for algorithm in (by_the_clock, Phased(ByteGradAlgorithm(), 5, then=ByteGradAlgorithm())):
        with pytest.raises(UsageError, match="depends on the run"):
            algorithm.bytes_per_round(1000, 4)


def test_without_a_formula_of_its_own_an_algorithm_is_told_to_define_one() -> None:
    with pytest.raises(UsageError, match="Define `bytes_per_round` in Algorithm, unless it depends on the run"):
        Algorithm().bytes_per_round(1000, 4)


# Rows and sentences, from runs made up here

SPEC = ComparisonSpec(task="charlm", algorithms=("gradient_allreduce",), ranks=2, links=("100mbit",), steps=24)


def made_up(
    algorithm: str, step_ms: float, losses: list[float], link: str | None = "100mbit", compute_ms: float = 1.0
) -> Run:
    """A run of a turn for each loss; rank 1 takes a millisecond more for each step."""

    def record(rank: int, step: int) -> Record:
        logged = {"held_out": losses[step // BLOCK_STEPS]} if (step + 1) % BLOCK_STEPS == 0 else {}
        return Record(
            step=step,
            rank=rank,
            time=0.0,
            wall_ms=step_ms + rank,
            compute_ms=compute_ms,
            waited_ms=step_ms + rank - compute_ms,
            exchange_ms=1.0,
            hidden_ms=0.0,
            bytes={"all_reduce": 100},
            logged=logged,
        )

    steps = BLOCK_STEPS * len(losses)
    return Run(
        name=algorithm,
        path=Path("nowhere"),
        settings={"algorithm": algorithm, "ranks": 2, "steps": steps, "bandwidth": link, "task": "charlm"},
        configuration="",
        machine={},
        status="finished",
        result={"loss": losses[-1], "consensus_distance": 0.0, "num_parameters": 10**6},
        records={rank: [record(rank, step) for step in range(steps)] for rank in range(2)},
    )


def test_a_row_counts_to_the_first_evaluation_at_the_target() -> None:
    row = row_of(made_up("gradient_allreduce", 99.0, [3.0, 2.0, 1.0]), 2.0, 10**6)
    assert row.steps_to_target == 2 * BLOCK_STEPS
    assert row.seconds_to_target == pytest.approx(2 * BLOCK_STEPS * 0.100)  # of the slower rank
    assert row.step_ms == pytest.approx(100.0)
    assert row.step_bytes == 100
    assert row.formula_bytes == 4 * 10**6
    missed = row_of(made_up("gradient_allreduce", 99.0, [3.0, 2.0, 1.0]), 0.5, 10**6)
    assert (missed.steps_to_target, missed.seconds_to_target) == (None, None)


@pytest.mark.parametrize("name", ["bytegrad", "qadam", "local_sgd"])
def test_a_contestant_uses_its_kernels_before_its_time_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU they are compiled then; here it counts that the compressor is reached, also after QAdam's warm-up."""
    used: list[int] = []
    compress = MinMaxUInt8.compress

    def counted(compressor: MinMaxUInt8, *call: Any) -> None:
        used.append(1)
        compress(compressor, *call)

    monkeypatch.setattr(MinMaxUInt8, "compress", counted)
    spec = ComparisonSpec(task="mlp", algorithms=(name,), ranks=2, links=("local",), steps=200)
    run_world(use_kernels, 2, spec, name)
    assert bool(used) == (name != "local_sgd")


def test_a_turn_holds_whole_intervals_of_every_algorithm() -> None:
    def spec(*algorithms: str) -> ComparisonSpec:
        return replace(SPEC, algorithms=algorithms, steps=60)

    assert spec(*algorithm_names()).block_steps == BLOCK_STEPS
    longer = spec("bytegrad", "diloco:interval=50:compressor=uint4", "local_sgd:interval=8")
    assert (longer.block_steps, longer.num_blocks, longer.num_steps) == (200, 1, 200)
    with pytest.raises(ConfigError, match="for intervals of 7, 11 steps the shortest"):
        spec("bytegrad", "local_sgd:interval=7", "local_sgd:interval=11")


def test_a_step_is_timed_over_the_turns_of_its_run() -> None:
    """Every fourth turn of 20 steps has an exchange, which takes as long as all the rest."""
    run = made_up("local_sgd:interval=80", 0.0, [3.0] * 7 + [1.0])
    for rank, records in run.records.items():
        run.records[rank][:] = [replace(each, wall_ms=161.0 if each.step % 80 == 79 else 1.0) for each in records]
    assert row_of(run, 2.0, 10**6).step_ms == 1.0
    run.settings["turn_steps"] = 80
    row = row_of(run, 2.0, 10**6)
    assert (row.step_ms, row.steps_to_target, row.seconds_to_target) == (3.0, 160, 0.48)


def test_the_target_is_what_all_reach_that_learn_as_well_as_plain_all_reduce() -> None:
    runs = [made_up(name, 1.0, [loss]) for name, loss in (("gradient_allreduce", 2.0), ("qadam", 2.1), ("async", 2.5))]
    assert common_target(runs) == 2.1


def test_the_recommendation_names_the_quickest_and_says_why() -> None:
    runs = [made_up("gradient_allreduce", 399.0, [3.0, 2.0]), made_up("bytegrad", 99.0, [3.0, 2.0])]
    rows = [row_of(run, 2.0, 10**6) for run in runs]
    assert recommendation(rows, SPEC, 2.0, 10**6) == (
        "For charlm (1 M parameters) with 2 ranks at 100mbit use bytegrad: it reached a loss of 2.000 in 4.0 s, "
        "gradient_allreduce in 16.0 s, because a step sends 100 B instead of 100 B and takes 100 instead of 400 ms."
    )
    assert "use gradient_allreduce: it reached a loss of 2.000 in 16.0 s, and no other algorithm did" in recommendation(
        rows[:1], SPEC, 2.0, 10**6
    )
    assert "nobody reached a loss of 2.000" in recommendation([row_of(runs[0], 1.0, 10**6)], SPEC, 2.0, 10**6)
    local = [row_of(made_up("gradient_allreduce", 9.0, [2.0], None), 2.0, 10**6)]
    assert "with 2 ranks within this machine use" in recommendation(local, SPEC, 2.0, 10**6)


def test_the_recommendation_tells_short_times_apart() -> None:
    runs = [made_up("gradient_allreduce", 1.1, [2.0]), made_up("bytegrad", 0.95, [2.0])]
    said = recommendation([row_of(run, 2.0, 10**6) for run in runs], SPEC, 2.0, 10**6)
    assert "in 0.039 s, gradient_allreduce in 0.042 s" in said
    assert "takes 1.9 instead of 2.1 ms." in said


def test_the_recommendation_names_who_may_be_as_quick() -> None:
    def said(step_ms: float) -> str:
        runs = [made_up("bytegrad", 99.0, [2.0]), made_up("gradient_allreduce", step_ms - 1, [2.0])]
        return recommendation([row_of(run, 2.0, 10**6) for run in runs], SPEC, 2.0, 10**6)

    assert said(108.0).endswith("not tell it from gradient_allreduce, which took at most 10% longer.")
    assert "tell it from" not in said(112.0)


def test_the_recommendation_says_where_torch_was_quicker() -> None:
    def said(torch_losses: list[float], losses: list[float], torch_ms: float = 9.0) -> str:
        runs = [made_up(TORCH_DDP, torch_ms, torch_losses), made_up("bytegrad", 99.0, losses)]
        return recommendation([row_of(run, 2.0, 10**6) for run in runs], SPEC, 2.0, 10**6)

    quicker = said([3.0, 2.0], [3.0, 2.0])
    assert "use bytegrad: it reached a loss of 2.000 in 4.0 s" in quicker
    assert quicker.endswith("torch DDP was quicker: 0.4 s.")
    assert "in 4.0 s, torch DDP in 8.0 s; it takes" in said([3.0, 2.0], [3.0, 2.0], torch_ms=199.0)
    assert said([3.0, 3.0], [3.0, 2.0]).endswith("in 4.0 s, and no other algorithm did in 40 steps.")
    assert "nobody but torch DDP reached a loss of 2.000" in said([3.0, 2.0], [3.0, 3.0])


def test_step_times_against_the_formulas_are_noticed() -> None:
    slow = row_of(made_up("gradient_allreduce", 320.0, [1.0]), 1.0, 10**6)
    fast = row_of(made_up("bytegrad", 80.0, [1.0]), 1.0, 10**6)
    wrong = row_of(made_up("bytegrad", 400.0, [1.0]), 1.0, 10**6)
    torchs = row_of(made_up(TORCH_DDP, 310.0, [1.0]), 1.0, 10**6)
    assert contradictions([slow, fast, torchs]) == []
    assert contradictions([slow, wrong]) == [(wrong, slow)]
    # By the formulas 320 and 80 ms on the link, beside 400 ms of computing that may hide the first.
    runs = [made_up("shift_one", 405.0, [1.0], compute_ms=400.0), made_up("bytegrad", 481.0, [1.0], compute_ms=400.0)]
    assert contradictions([row_of(run, 1.0, 10**6) for run in runs]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "chess"), "task 'chess' is unknown."),
        (("--algorithms", "magic"), "algorithm='magic' is unknown."),
        (("--algorithms", ","), "algorithm='' is unknown."),
        (("--ranks", "1"), "ranks=1: synchronising is compared with 2 to 64 ranks."),
        (("--steps", "0"), "steps=0: give a number at least 1."),
        (("--bandwidth", "fast"), "bandwidth='fast': write bits per second"),
        (("--bandwidth", ""), "bandwidth='': write bits per second"),
        (("--json", "nowhere/result.json"), "--json nowhere/result.json: there is no folder nowhere."),
        (("--out", "file/comparison"), "runs cannot be written to --out file/comparison: Not a directory"),
        (("--out", "full"), "--out full is not empty. Name a new folder."),
    ],
)
def test_bad_input_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").touch()
    status, shown, refusal = run(*arguments)
    assert status == 2
    assert shown == ""
    assert refusal.startswith("error: ")
    assert message in refusal
    assert refusal.count("\n") == 1


def test_a_second_comparison_does_not_write_into_the_folder_of_the_first(tmp_path: Path) -> None:
    with only_writer(tmp_path):
        (tmp_path / ".lock").unlink()  # as it was when the second looked whether the folder is empty
        status, _, refusal = run(*small(tmp_path, "local"))
    assert (status, refusal[: len(f"error: {tmp_path}: another ")]) == (2, f"error: {tmp_path}: another ")


def test_all_means_every_algorithm() -> None:
    assert parse_algorithms(["all"]) == tuple(algorithm_names())
