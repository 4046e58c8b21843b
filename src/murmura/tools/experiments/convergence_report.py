"""Tables and charts of the convergence study, made of its results alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from murmura.algorithms.names import PLAIN
from murmura.errors import ConfigError
from murmura.tools.experiments.charts import Axis, Line, LineChart
from murmura.tools.experiments.convergence import (
    BUDGETS,
    RATES,
    Method,
    Results,
    Study,
    evaluated_at,
    or_infinite,
    sent,
    time_taken,
)

MARK = "<!-- convergence: {} -->"
ABOVE, OVERLAP, BELOW = "above", "overlap", "below"
TITLES = {"steps": "equal steps", "time": "equal time", "bytes": "bytes sent"}
AXES = {
    "steps": Axis("step"),
    "time": Axis("time, in steps without communication"),
    "bytes": Axis("bytes that a rank has sent", logarithmic=True),
}
SPENT: dict[str, Callable[[str, int], list[float]]] = {
    "steps": lambda algorithm, steps: [float(step) for step in range(1, steps + 1)],
    "time": time_taken,
    "bytes": sent,
}


@dataclass(frozen=True)
class Row:
    """How a method ended within a budget: its excess loss on each seed, and the same over that of all-reduce."""

    method: Method
    rate: float
    steps: int
    finals: Sequence[float]
    ratios: Sequence[float]

    @property
    def beside_all_reduce(self) -> str:
        """Where the method ended on every seed; an overlap if seeds disagree."""
        if self.method.algorithm == PLAIN:
            return ""
        return ABOVE if min(self.ratios) > 1 else BELOW if max(self.ratios) < 1 else OVERLAP


def rows(study: Study, results: Results, budget: str) -> list[Row]:
    """A row for each method, the best first."""
    finals = {
        each: [or_infinite(curve[-1]) for curve in _curves(study, results, each, budget)] for each in study.methods
    }
    plain = finals[study.plain]
    found = [
        Row(
            *(method, _rate(study, results, method, budget), study.num_steps(method, budget), ends),
            [mine / its for mine, its in zip(ends, plain, strict=True)],
        )
        for method, ends in finals.items()
    ]
    return sorted(found, key=lambda row: statistics.mean(row.finals))


def table(study: Study, results: Results, budget: str) -> str:
    """A Markdown table of `rows`, and a sentence on who can be told from all-reduce."""
    found = rows(study, results, budget)
    limit = sent(PLAIN, study.num_steps(study.plain, "bytes"))[-1]
    header = ["method", "learning rate", "steps", "excess loss", "over all-reduce's", "on every seed"]
    lines = [header, ["---", "---:", "---:", "---:", "---:", "---"]]
    if budget == "bytes":
        header.insert(3, "of the bytes")
        lines[1].insert(3, "---:")
    for row in found:
        edge = " (edge)" if row.rate in (RATES[0], RATES[-1]) else ""
        cells = [row.method.label, f"{row.rate:g}{edge}", str(row.steps), _spread(row.finals), _spread(row.ratios)]
        if budget == "bytes":
            cells.insert(3, f"{sent(row.method.algorithm, row.steps)[-1] / limit:.0%}")
        lines.append([*cells, row.beside_all_reduce])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{_sentence(found)}"


def _sentence(found: Sequence[Row]) -> str:
    said = {
        BELOW: "Below all-reduce on every seed",
        OVERLAP: "Not to be told from it",
        ABOVE: "Above it on every seed",
    }
    parts = []
    for verdict, words in said.items():
        labels = [row.method.label for row in found if row.beside_all_reduce == verdict]
        parts.append(f"{words}: {', '.join(labels) or 'none'}.")
    return " ".join(parts)


def charts(study: Study, results: Results) -> dict[str, str]:
    """By the names of their files, charts of each family over steps, time and bytes."""
    families = dict.fromkeys(method.family for method in study.methods if method is not study.plain)
    return {
        f"convergence-{axis}-{family.replace(' ', '-')}.svg": _chart(study, results, axis, family).to_svg()
        for axis in AXES
        for family in families
    }


def _chart(study: Study, results: Results, axis: str, family: str) -> LineChart:
    methods = [study.plain, *(method for method in study.methods if method.family == family)]
    lines = [_line(study, results, method, axis) for method in dict.fromkeys(methods)]
    title = f"{family}: {TITLES[axis]}, mean and range of {len(study.seeds)} seeds"
    return LineChart(title, AXES[axis], Axis("excess loss, nats", logarithmic=True), lines)


def _line(study: Study, results: Results, method: Method, axis: str) -> Line:
    """The curve over `axis`. Over bytes it is that of a run with all steps: its bytes alone decide where it lies."""
    budget = "time" if axis == "time" else "steps"
    steps = study.num_steps(method, budget)
    places = [0.0, *SPENT[axis](method.algorithm, steps)]
    at = [places[step] for step in evaluated_at(steps)]
    by_step = list(zip(*_curves(study, results, method, budget), strict=True))
    drawn = slice(1 if axis == "bytes" else 0, None)  # nothing has been sent at step 0, and the axis is logarithmic
    return Line(
        method.label,
        [(x, statistics.mean(values)) for x, values in zip(at, by_step, strict=True)][drawn],
        [(x, min(values), max(values)) for x, values in zip(at, by_step, strict=True)][drawn],
    )


def with_tables(page: str, study: Study, results: Results) -> str:
    """`page` with each table replaced, between its two marks."""
    for budget in BUDGETS:
        mark = MARK.format(budget)
        parts = page.split(mark)
        if len(parts) != 3:
            raise ConfigError(f"the page must hold {mark!r} twice, around the place for the table.")
        page = f"{parts[0]}{mark}\n{table(study, results, budget)}\n{mark}{parts[2]}"
    return page


def write(page: Path, study: Study, results: Results) -> None:
    """Put the tables into `page`, and the charts into the folder `figures` beside it."""
    text = with_tables(page.read_text(encoding="utf-8"), study, results)
    figures = page.parent / "figures"
    figures.mkdir(exist_ok=True)
    for name, chart in charts(study, results).items():
        (figures / name).write_text(chart + "\n", encoding="utf-8")
    page.write_text(text, encoding="utf-8")


def _curves(study: Study, results: Results, method: Method, budget: str) -> list[list[float]]:
    """The curves of `method`, one for each seed."""
    runs = study.measured(method, budget, results)
    missing = [run for run in runs if run not in results]
    if missing or not runs:
        raise ConfigError(f"runs of {method.label!r} are missing. Let the study run to its end first.")
    return [results[run] for run in runs]


def _rate(study: Study, results: Results, method: Method, budget: str) -> float:
    rate = study.rate(method, budget, results)
    assert rate is not None, "there are no curves without it"
    return rate


def _spread(values: Sequence[float]) -> str:
    """The mean, and the least and the greatest in brackets."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
