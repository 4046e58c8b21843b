"""The convergence study: the floor of its task, its budgets, its resuming, and what it says of methods."""

from __future__ import annotations

import math
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from murmura import ConfigError, UsageError
from murmura.tools.experiments import convergence, convergence_report
from murmura.tools.experiments.charts import Axis, Line, LineChart
from murmura.tools.experiments.convergence import BUDGETS, METHODS, PLAIN, Method, Results, Run, Study, Trigrams

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "convergence.py"
ALL_REDUCE = next(method for method in METHODS if method.algorithm == PLAIN)
BF16 = next(method for method in METHODS if method.label == "bf16")


@pytest.mark.parametrize("skew", [0.0, 2.0])
def test_the_excess_is_the_expected_cross_entropy_less_the_floor(skew: float) -> None:
    task = Trigrams(seed=3, skew=skew)
    ((contexts, joint),) = task.held_out()
    assert joint.sum().item() == pytest.approx(1, abs=1e-12)
    truth = task.transitions[contexts[:, 0], contexts[:, 1]].log()
    assert task.loss(truth, joint).item() == pytest.approx(0, abs=1e-12), "nothing is better than the chain itself"
    guess = torch.randn(truth.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = -(joint * functional.log_softmax(guess, dim=1)).sum().item()
    assert task.loss(guess, joint).item() == pytest.approx(expected - task.floor, abs=1e-12)
    assert task.loss(guess, joint).item() > 1


def test_batches_follow_the_chain() -> None:
    """What was drawn has, on average, the entropy that the floor says: to four standard errors."""
    task = Trigrams(seed=1, batch_size=20_000)
    contexts, following = task.batch(rank=2, step=0)
    surprise = -task.transitions[contexts[:, 0], contexts[:, 1], following].log()
    assert surprise.mean().item() == pytest.approx(task.floor, abs=4 * surprise.std().item() / math.sqrt(20_000))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.label)
def test_a_method_gets_as_many_steps_as_its_budget_allows_and_no_more(method: Method) -> None:
    steps = 60
    limits = {"time": 60.0, "bytes": convergence.sent(PLAIN, 4)[-1]}
    for budget, spent in {"time": convergence.time_taken, "bytes": convergence.sent}.items():
        fitting = convergence.fitting_steps(method.algorithm, budget, steps)
        assert spent(method.algorithm, fitting)[-1] <= limits[budget] * (1 + 1e-6)
        assert fitting == steps or spent(method.algorithm, fitting + 1)[-1] > limits[budget] * (1 + 1e-6)


def test_time_and_bytes_are_those_of_the_model_that_the_module_states() -> None:
    steps = [convergence.fitting_steps(name, "time", 600) for name in (PLAIN, BF16.algorithm, "decentralized")]
    assert steps == [120, 200, 150], "computing 1 and sending 4; sending 2; sending 4, hidden"
    halves = [convergence.fitting_steps(name, "bytes", 600) for name in (PLAIN, BF16.algorithm)]
    assert halves == [40, 80]
    warm_up = convergence.sent("qadam", 10)
    assert warm_up[:2] == convergence.sent(PLAIN, 2), "its warm-up, a fifth, sends gradients as they are"
    assert warm_up[-1] < convergence.sent(PLAIN, 10)[-1] / 2


def results_of(study: Study, finals: dict[str, list[float]]) -> Results:
    """Made up: the rate of 0.01 is the best, with few steps 0.02, and a method ends on each seed as `finals` say."""
    results: Results = {}
    for method in study.methods:
        for budget in BUDGETS:
            best = 0.02 if 2 * study.num_steps(method, budget) <= study.steps else 0.01
            tuning = study.tuning(method, budget, results)
            results |= {run: [1.0, abs(math.log(run.rate / best))] for run in tuning}
            for seed, final in zip(study.seeds, finals[method.label], strict=True):
                run = study.run(method, budget, seed, best)
                results[run] = [2.0] * (len(convergence.evaluated_at(run.steps)) - 1) + [final]
    return results


@pytest.mark.parametrize(
    ("finals", "verdict"),
    [([1.1, 2.1], "above"), ([0.9, 1.9], "below"), ([0.9, 2.1], "overlap"), ([1.1, math.nan], "above")],
)
def test_methods_are_told_apart_seed_by_seed(finals: list[float], verdict: str) -> None:
    study = Study((ALL_REDUCE, BF16), seeds=(1, 2), steps=30)
    results = results_of(study, {"all-reduce": [1.0, 2.0], "bf16": finals})
    row = next(row for row in convergence_report.rows(study, results, "steps") if row.method is BF16)
    assert (row.rate, row.beside_all_reduce) == (0.01, verdict)
    assert row.ratios == pytest.approx([finals[0], math.inf if math.isnan(finals[1]) else finals[1] / 2])


def test_a_rate_is_chosen_when_all_were_tried_and_a_report_made_when_all_was_run() -> None:
    study = Study((ALL_REDUCE,), seeds=(1,), steps=30)
    results = results_of(study, {"all-reduce": [1.0]})
    assert [study.rate(ALL_REDUCE, budget, results) for budget in BUDGETS] == [0.01, 0.01, 0.02, 0.02]
    assert [run.rate for run in study.tuning(ALL_REDUCE, "time", results)] == [0.005, 0.01, 0.02], "the next to 0.01"
    assert set(study.wanted(results)) == set(results)
    assert len(results) == study.num_runs
    assert study.is_complete(results)
    del results[study.run(ALL_REDUCE, "time", 1, 0.02)]
    assert not study.is_complete(results)
    with pytest.raises(ConfigError, match="runs of 'all-reduce' are missing"):
        convergence_report.table(study, results, "time")
    del results[study.tuning(ALL_REDUCE, "steps", results)[0]]
    assert [study.rate(ALL_REDUCE, budget, results) for budget in BUDGETS] == [None] * 4
    assert study.wanted(results) == study.tuning(ALL_REDUCE, "steps", results)


def test_a_chart_has_a_band_for_each_curve_and_room_for_it() -> None:
    line = Line("a", [(0.0, 2.0), (1.0, 2.0)], band=[(0.0, 1.0, 4.0), (1.0, 2.0, 2.0)])
    drawn = LineChart("bands", Axis("x"), Axis("y"), [line]).to_svg()
    top, bottom = "64.0,36.0", "64.0,312.0"  # of the place for curves: 4 and 1
    assert f'points="{top} 624.0,220.0 624.0,220.0 {bottom}"' in drawn


def test_a_run_is_read_by_the_names_of_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"excess": [0.5], "steps": 2, "seed": 1, "rate": 0.01, "algorithm": "local_sgd"}\n')
    assert convergence.read(path) == {Run("local_sgd", 0.01, 1, 2): [0.5]}
    path.write_text('{"steps": 2, "seed": 1, "rate": 0.01, "algorithm": "local_sgd"}\n')
    with pytest.raises(ConfigError, match=r"no run"):
        convergence.read(path)


def test_a_run_leaves_the_number_of_threads_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        torch.set_num_threads(1)
        raise UsageError("no run")

    monkeypatch.setattr(convergence, "run_world", fail)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(UsageError):
            convergence.train(Run(PLAIN, 0.01, 1, 2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_line_that_is_no_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    convergence.append(path, Run(PLAIN, 0.01, 1, 2), [1.2346, 0.5])
    assert convergence.read(path) == {Run(PLAIN, 0.01, 1, 2): [1.2346, 0.5]}
    path.write_text(path.read_text() + "{half of it")
    with pytest.raises(ConfigError, match=r"no run .* Remove it: '\{half of it'"):
        convergence.read(path)


def test_a_run_learns_the_same_each_time() -> None:
    run = Run(PLAIN, 0.02, 1, 20)
    curve = convergence.train(run)
    assert len(curve) == len(convergence.evaluated_at(20)) == 21
    assert curve[-1] < 0.75 * curve[0]
    assert convergence.train(run) == curve == [float(f"{each:.5g}") for each in curve]  # as a file will hold it


def test_the_study_goes_on_where_it_was_and_ends_with_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, trained = runpy.run_path(str(SCRIPT)), []
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    page.write_text("".join(f"{mark}\n{mark}\n" for mark in map(convergence_report.MARK.format, BUDGETS)))

    def train(run: Run) -> list[float]:
        trained.append(run)
        return [1.0] * len(convergence.evaluated_at(run.steps))

    def start(*words: str) -> str:
        monkeypatch.setattr("sys.argv", [str(SCRIPT), "--results", str(results), *words])
        # In threads: it is the order of runs that is tried here, and processes would have to import torch.
        pool = lambda jobs, mp_context: ThreadPoolExecutor(jobs)  # noqa: E731
        program["main"].__globals__.update(train=train, ProcessPoolExecutor=pool)
        program["main"]()
        return capsys.readouterr().out

    words = ["--steps", "30", "--seeds", "2", "--methods", "local_sgd", "--jobs", "2"]
    assert "Start this again for the rest." in start(*words, "--minutes", "0")
    assert trained == []
    start(*words[:-4], "--methods", PLAIN)
    finished = list(trained)
    assert "over all-reduce's" in start(*words, "--report", str(page))
    assert len(trained) == len({*trained}) > len(finished) > 0, "nothing was run twice"
    study, found = Study(program["methods_named"]("local_sgd"), seeds=(1, 2), steps=30), convergence.read(results)
    assert {run.algorithm for run in trained[len(finished) :]} == {"local_sgd"}
    assert {*found} == {*trained}
    assert study.is_complete(found)
    assert all(convergence_report.table(study, found, budget) in page.read_text() for budget in BUDGETS)
    assert len(list((tmp_path / "figures").glob("convergence-*.svg"))) == 3
