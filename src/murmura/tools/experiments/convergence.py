"""The convergence experiment: the loss of each algorithm after the same number of steps as plain all-reduce."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from murmura import Transport
from murmura.tools import ranks as worlds
from murmura.tools.experiments.charts import Axis, Line, LineChart
from murmura.tools.experiments.loop import Training
from murmura.tools.experiments.recipes import configuration
from murmura.tools.experiments.tasks import task_named

BASELINE = "gradient_allreduce"
TOLERANCE = 1.02
MARK = "<!-- convergence table -->"
TITLES = {"markov": "order-2 Markov text", "mlp": "teacher and student, shards unlike"}
EVALUATIONS = 20


@dataclass(frozen=True)
class Curve:
    """The loss curve of one algorithm on one task with `ranks` ranks; `configuration` describes the algorithm."""

    task: str
    algorithm: str
    configuration: str
    ranks: int
    floor: float | None
    steps: list[int]
    losses: list[float]  # of the mean model, held out, at `steps`
    consensus_distance: float
    ratio: float  # of the final loss to all-reduce's

    @property
    def final(self) -> float:
        return self.losses[-1]


def run_convergence(
    tasks: Sequence[str],
    algorithms: Sequence[str],
    ranks: Sequence[int],
    steps: int,
    on_progress: Callable[[str], None] = lambda what: None,
) -> list[Curve]:
    """Return a curve for each algorithm; all-reduce is always included as the reference."""
    curves = []
    for task in tasks:
        for size in ranks:
            baseline = 0.0
            for algorithm in dict.fromkeys([BASELINE, *algorithms]):
                what = f"{task}, {size} ranks: {algorithm}"
                on_progress(what)
                taken, losses, distance = worlds.run_here(what, _learn, size, task, algorithm, steps)
                baseline = baseline or losses[-1]
                about, floor = configuration(algorithm, steps), task_named(task).floor
                curve = Curve(task, algorithm, about, size, floor, taken, losses, distance, losses[-1] / baseline)
                curves.append(curve)
    return curves


def _learn(transport: Transport, task: str, algorithm: str, steps: int) -> tuple[list[int], list[float], float]:
    torch.set_num_threads(1)
    training = Training(transport, task_named(task), algorithm, steps)
    every = max(1, steps // EVALUATIONS)
    points = {0: training.evaluate()}
    while training.step < steps:
        training.advance()
        if training.step % every == 0 or training.step == steps:
            points[training.step] = training.evaluate()
    distance = training.ddp.consensus_distance()
    training.close()
    return list(points), list(points.values()), distance


# Reporting the curves


def to_json(curves: Sequence[Curve]) -> str:
    return json.dumps({"curves": [asdict(curve) for curve in curves]}, indent=1)


def with_table(page: str, curves: Sequence[Curve]) -> str:
    """Return `page` with the table between its two marks replaced."""
    before, _, after = page.split(MARK)
    return f"{before}{MARK}\n{table(curves)}\n\n{beyond(curves)}\n{MARK}{after}"


def by_world(curves: Sequence[Curve]) -> dict[tuple[str, int], list[Curve]]:
    worlds: dict[tuple[str, int], list[Curve]] = {}
    for curve in curves:
        worlds.setdefault((curve.task, curve.ranks), []).append(curve)
    return worlds


def table(curves: Sequence[Curve]) -> str:
    """Return a Markdown table: one row per algorithm, one column per world, the ratio to all-reduce in brackets."""
    worlds = by_world(curves)
    header = ["algorithm", *(f"{task}, {ranks} ranks" for task, ranks in worlds), "configuration"]
    rows = [header, ["---", *("---:" for _ in worlds), "---"]]
    for name, about in dict.fromkeys((curve.algorithm, curve.configuration) for curve in curves):
        cells = [next(curve for curve in together if curve.algorithm == name) for together in worlds.values()]
        rows.append([f"`{name}`", *(f"{each.final:.4f} ({each.ratio:.3f})" for each in cells), f"`{about}`"])
    rows.append(["floor", *(f"{together[0].floor:.4f}" for together in worlds.values()), ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def beyond(curves: Sequence[Curve]) -> str:
    """Return a sentence that names the curves whose final loss exceeds the tolerance."""
    worlds: dict[str, list[str]] = {}
    for curve in curves:
        if curve.ratio > TOLERANCE:
            worlds.setdefault(f"`{curve.algorithm}`", []).append(f"{curve.task} with {curve.ranks} ranks")
    found = "; ".join(f"{name} ({', '.join(where)})" for name, where in worlds.items()) or "none"
    return f"More than {TOLERANCE - 1:.0%} above all-reduce: {found}."


def chart(curves: Sequence[Curve]) -> str:
    """Return a chart of the curves of one world, as SVG."""
    first = curves[0]
    return LineChart(
        f"{TITLES.get(first.task, first.task)}, {first.ranks} ranks",
        Axis("step"),
        Axis("held-out loss of the mean model", logarithmic=True),
        [Line(curve.algorithm, list(zip(curve.steps, curve.losses, strict=True))) for curve in curves],
        rules=[("floor", first.floor)] if first.floor is not None else [],
    ).to_svg()
