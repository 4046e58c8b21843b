"""`murmura bench ddp` from its options to its tables and file, on tiny models; no speed is asserted."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import SGD
from typer.testing import CliRunner

from murmura import ConfigError, MurmuraError, Transport, run_world
from murmura.tools.bench.checks import check_in_step
from murmura.tools.bench.ddp import (
    BARE,
    DEFAULT_BUCKETS,
    HELD_BACK,
    MURMURA,
    NOT_OVERLAPPED,
    OVERLAPPED,
    TORCH_DDP,
    DDPSpec,
    Measured,
    Stage,
    StageKind,
    backward_seconds,
    matching_bandwidth,
    measure,
    step_names,
    steps_per_batch,
)
from murmura.tools.bench.ddp_report import DDPReport, report_of
from murmura.tools.bench.harness import MIN_ROUNDS, Sample, threads_of_a_rank
from murmura.tools.bench.models import MLP, MODELS, CharLM, Model
from murmura.tools.bench.steps import PHASES, Method, Wrapped, bare, held_back, murmura_ddp, plain_backward
from murmura.tools.cli import bench
from murmura.tools.cli.bench_tables import ddp_tables
from murmura.tools.cli.main import app
from murmura.tools.cli.output import MIN_COLUMNS
from murmura.tools.options import one_of, parse_list
from murmura.tools.progress import Progress

TINY: dict[str, Model] = {
    "charlm": CharLM(batch=2, layers=1, width=16, heads=2, context=8, vocabulary=16),
    "mlp": MLP(batch=2, layers=3, width=16),
}


@pytest.fixture(scope="module", autouse=True)
def _compiler() -> None:
    """The first optimizer makes torch import its compiler, which sets a variable: before the police looks."""
    SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, model in TINY.items():
        monkeypatch.setitem(MODELS, name, model)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "ddp", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


# The command


@pytest.mark.slow
@pytest.mark.timeout(240)  # each of eleven rank processes imports torch's compiler
@pytest.mark.usefixtures("_tiny")
def test_torch_ddp_is_measured_beside_murmura(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    status, text, progress = run("--ranks", "2", "--models", "charlm", "--seconds", "0.05", "--json", str(file))
    assert status == 0
    for words in ("torch DDP", "slow link", "memory of a rank", str(file)):
        assert words in text
    lines = re.sub(r"\d+ rounds", "N rounds", progress).splitlines()
    stages = ["charlm, 1 rank", "charlm, 2 ranks", "charlm, 2 ranks, slow link", "charlm, 2 ranks, memory"]
    assert lines == [f"{stage}: N rounds" for stage in stages]
    told = json.loads(file.read_text(encoding="utf-8"))
    check_header(told)
    assert [(row["ranks"], row["contestant"]) for row in told["steps"]] == [
        *((1, name) for name in (MURMURA, TORCH_DDP, BARE)),
        *((2, name) for name in (MURMURA, HELD_BACK, TORCH_DDP, BARE)),
    ]
    assert [row["contestant"] for row in told["slow_link"]] == [OVERLAPPED, NOT_OVERLAPPED, DEFAULT_BUCKETS]
    for row in told["steps"]:
        check_row(row)
    for row in told["slow_link"]:
        assert float(row.pop("bandwidth").removesuffix("mbit")) > 0
        check_row(row)
    used = {row["contestant"]: row for row in told["memory"]}
    assert set(used) == {MURMURA, TORCH_DDP, BARE}
    for row in used.values():
        assert set(row) == {"model", "ranks", "contestant", "bytes", "extra_bytes"}
        assert row["extra_bytes"] == pytest.approx(row["bytes"] - used[BARE]["bytes"], abs=1)


def check_header(told: dict[str, object]) -> None:
    assert told["benchmark"] == "ddp"
    parameters = TINY["charlm"].num_parameters()
    about = TINY["charlm"].about
    assert told["models"] == {"charlm": {"about": about, "parameters": parameters, "gradient_bytes": 4 * parameters}}
    names = {MURMURA, HELD_BACK, TORCH_DDP, BARE, OVERLAPPED, NOT_OVERLAPPED, DEFAULT_BUCKETS}
    assert isinstance(told["contestants"], dict)
    assert set(told["contestants"]) == names
    assert {"schema_version", "date", "machine", "load_before", "seconds_per_stage"} < set(told)


def check_row(row: dict[str, object]) -> None:
    assert set(row) == {
        *("model", "ranks", "contestant", "milliseconds", "quartiles", "phases", "cpu_milliseconds"),
        *("rounds", "batch", "ratio"),
    }
    assert isinstance(row["quartiles"], list)
    assert isinstance(row["ratio"], dict)
    assert isinstance(row["phases"], dict)
    first, third = row["quartiles"]
    assert 0 < first <= row["milliseconds"] <= third
    assert set(row["phases"]) == {"forward", "backward", "optimizer"}
    assert bool(row["ratio"]) == (row["contestant"] in (MURMURA, OVERLAPPED))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0"), "'0' is no number of ranks. Write a list of numbers from 1 to 64: 2,4."),
        (("--ranks", "2,two"), "'two' is no number of ranks"),
        (("--ranks", "2,"), "'' is no number of ranks"),
        (("--against", "horovod"), "--against='horovod' is unknown. Known: 'torch-ddp'."),
        (("--models", "resnet"), "--models='resnet' is unknown. Known: 'charlm', 'mlp'."),
        (("--seconds", "0"), "Give seconds above 0"),
        (("--seconds", "nan"), "Give seconds above 0"),
        (("--json", "/nowhere/result.json"), "there is no folder /nowhere"),
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
    def fail(spec: DDPSpec, on_progress: object) -> Measured:
        raise MurmuraError("rank 1 was killed.")

    monkeypatch.setattr(bench, "run_ddp", fail)
    assert run() == (1, "", "error: rank 1 was killed.\n")


def test_an_error_of_a_peer_names_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr("murmura.tools.ranks.run_world", fail)
    status, _, error = run("--ranks", "2", "--models", "mlp")
    assert status == 1
    assert "the measurement of mlp, 1 rank failed: Gloo connectFullMesh failed" in error


def test_help_teaches() -> None:
    status, text, _ = run("--help")
    assert status == 0
    for word in ("--ranks", "--models", "--seconds", "--json", "For example"):
        assert word in text


# What to measure


def test_lists_are_read_and_each_entry_counts_once() -> None:
    assert parse_list("4, 2,4", bench.parse_num_ranks) == (4, 2)
    assert parse_list(["mlp,charlm", "mlp"], one_of(MODELS, "--models")) == ("mlp", "charlm")


def test_one_rank_is_always_measured_and_only_for_its_steps() -> None:
    spec = DDPSpec(ranks=(4, 2), models={"mlp": TINY["mlp"]})
    assert spec.rank_counts == (1, 2, 4)
    assert [str(stage) for stage in spec.stages()] == [
        "mlp, 1 rank",
        *(f"mlp, {ranks} ranks{kind}" for ranks in (2, 4) for kind in ("", ", slow link", ", memory")),
    ]


def test_every_fault_of_an_order_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)nothing to measure.*seconds"):
        DDPSpec(ranks=(), seconds=-1)


# The models


def test_the_models_are_of_the_promised_size() -> None:
    assert MODELS["charlm"].num_parameters() == pytest.approx(5e6, rel=0.1)
    assert sum(isinstance(layer, nn.Linear) for layer in MODELS["mlp"].build().modules()) == 24


@pytest.mark.parametrize("name", TINY)
def test_ranks_build_the_same_module_and_see_different_data(name: str) -> None:
    model = TINY[name]
    one = model.build()
    torch.manual_seed(1)
    other = model.build()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert sum(parameter.numel() for parameter in one.parameters()) == model.num_parameters()
    inputs, targets = model.batches(0, 2)[0]
    assert torch.equal(model.batches(0, 1)[0][0], inputs)
    assert not torch.equal(model.batches(1, 1)[0][0], inputs)
    before = float(model.loss(one(inputs), targets).detach())
    optimizer = model.optimizer(one)
    for _ in range(20):
        optimizer.zero_grad()
        plain_backward(model.loss(one(inputs), targets))
        optimizer.step()
    assert float(model.loss(one(inputs), targets).detach()) < before


# The measurement, on ranks that are threads


def methods_in_thread(transport: Transport) -> list[Method]:
    return [murmura_ddp(MURMURA, transport), held_back(HELD_BACK, transport), bare(BARE)]


def measure_in_thread(transport: Transport) -> tuple[list[Sample], list[Progress]]:
    told: list[Progress] = []
    return measure(transport, methods_in_thread(transport), TINY["charlm"], 0.01, 3, told.append), told


def test_ranks_measure_every_contestant_and_agree() -> None:
    results = run_world(measure_in_thread, 3)
    samples, told = results[0]
    assert all(theirs == samples for theirs, _ in results)
    assert [sample.contestant for sample in samples] == [MURMURA, HELD_BACK, BARE]
    for sample in samples:
        assert sample.rounds >= MIN_ROUNDS
        assert min(sample.by_round()) > 0
        for of_rank in sample.figures:
            for whole, *phases, _cpu in of_rank:
                assert len(phases) == len(PHASES)
                assert sum(phases) == pytest.approx(whole)
    assert {each.stage for each in told} == {3}
    assert told[-1].fraction == 1


def measure_a_liar(transport: Transport) -> None:
    liar = Method("liar", "", Wrapped)  # claims to average, and does not
    measure(transport, [*methods_in_thread(transport), liar], TINY["mlp"], 0.01)


def test_a_contestant_with_wrong_gradients_is_not_measured() -> None:
    with pytest.raises(MurmuraError, match=r"liar has wrong gradients: that of '0.weight' is off by"):
        run_world(measure_a_liar, 2)


def measure_a_backslider(transport: Transport) -> None:
    def wrap(module: nn.Module) -> Wrapped:
        honest = murmura_ddp(MURMURA, transport).wrap(module)
        num_backwards = 0

        def backward(loss: Tensor) -> None:
            nonlocal num_backwards
            num_backwards += 1
            honest.backward(loss)
            if num_backwards > 1:
                next(module.parameters()).grad.add_(transport.rank)  # type: ignore[union-attr]

        return replace(honest, backward=backward)

    measure(transport, [Method("backslider", "", wrap)], TINY["mlp"], 0.01)


def test_a_contestant_whose_replicas_drift_apart_is_found_out() -> None:
    with pytest.raises(MurmuraError, match="the replicas of backslider have drifted apart"):
        run_world(measure_a_backslider, 2)


def check_not_a_number(transport: Transport) -> None:
    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, float("nan"))
    check_in_step(transport, module, "anyone")


def test_replicas_that_have_no_value_are_not_in_step() -> None:
    with pytest.raises(MurmuraError, match="drifted"):
        run_world(check_not_a_number, 2)


# Plain arithmetic


def test_batches_hold_a_few_steps() -> None:
    assert [steps_per_batch(seconds) for seconds in (1e-4, 0.02, 0.049, 3.0)] == [16, 7, 3, 2]


def test_the_link_carries_the_ring_in_the_time_given() -> None:
    assert matching_bandwidth(10**6, 2, 1.0) == "8.000mbit"  # each of two ranks sends the million bytes once
    assert matching_bandwidth(10**6, 4, 0.5) == "24.000mbit"


# The report


def sample_of(name: str, *milliseconds: float) -> Sample:
    """Of one rank: each phase takes half of the step, to tell them from it."""
    rounds = [[each / 1000, *[each / 2000] * 3, each / 1000] for each in milliseconds]
    return Sample(name, "made up", 2, [rounds])


def made_up() -> DDPReport:
    samples = [
        sample_of(MURMURA, 10, 20, 30, 40, 50),
        sample_of(HELD_BACK, 33, 33, 33),
        sample_of(TORCH_DDP, 60, 60, 60),
        sample_of(BARE, 24, 24, 24),
    ]
    slow = [sample_of(OVERLAPPED, 40, 40), sample_of(NOT_OVERLAPPED, 60, 60), sample_of(DEFAULT_BUCKETS, 50, 50)]
    used = {MURMURA: 2**20 * 102.0, TORCH_DDP: 2**20 * 101.0, BARE: 2**20 * 100.0}
    found = Measured(
        0.5,
        {Stage(StageKind.STEP, 2, "mlp"): samples},
        {Stage(StageKind.SLOW_LINK, 2, "mlp"): ("123.400mbit", slow)},
        {Stage(StageKind.MEMORY, 2, "mlp"): used},
    )
    return report_of(DDPSpec(ranks=(2,), models={"mlp": TINY["mlp"]}), found)


def test_rows_hold_medians_quartiles_and_ratios() -> None:
    own, not_overlapped, torch_ddp, bare = made_up().steps
    assert own.milliseconds == pytest.approx(30)
    assert own.quartiles == pytest.approx((20, 40))
    assert own.phases == pytest.approx({"forward": 15, "backward": 15, "optimizer": 15})
    assert own.ratio == pytest.approx({HELD_BACK: 1.1, TORCH_DDP: 2.0, BARE: 0.8})
    assert not_overlapped.ratio == torch_ddp.ratio == bare.ratio == {}
    assert (own.rounds, own.batch) == (5, 2)
    assert own.cpu_milliseconds == pytest.approx(30)


def test_backward_is_that_of_the_bare_module() -> None:
    assert backward_seconds([sample_of(MURMURA, 50), sample_of(BARE, 10, 20, 60)]) == pytest.approx(0.01)


def test_the_tables_tell_who_is_faster_and_what_it_costs() -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=MIN_COLUMNS + 40, record=True, file=nowhere)
        for table in ddp_tables(made_up()):
            console.print(table)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    times = "30.0 (20.0-40.0) 33.0 (33.0-33.0) 60.0 (60.0-60.0) 24.0 (24.0-24.0)"
    assert f"mlp 2 x {threads_of_a_rank(2)} {times} 2.00 1.250 1.10" in lines
    assert "mlp 2 123 Mbit/s 40.0 (40.0-40.0) 50.0 (50.0-50.0) 60.0 (60.0-60.0) 1.50" in lines
    assert "mlp 2 100.0 +2.0 +1.0" in lines


def test_a_world_of_one_has_nothing_to_overlap() -> None:
    assert step_names(1) == [MURMURA, TORCH_DDP, BARE]
    assert step_names(2) == [MURMURA, HELD_BACK, TORCH_DDP, BARE]
