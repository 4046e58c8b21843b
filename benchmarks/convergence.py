"""Every algorithm on tasks with a known floor, in the same number of steps as plain all-reduce.

    python benchmarks/convergence.py \\
        --json docs/figures/convergence.json --figures docs/figures --page docs/algorithms.md

Prints a table; `--figures` draws a chart for each task and number of ranks, `--page` puts the table into a page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from murmura.tools.experiments import Curve, parse_algorithms, run_convergence
from murmura.tools.experiments.charts import Axis, Line, LineChart
from murmura.tools.experiments.convergence import to_json

TOLERANCE = 1.02
MARK = "<!-- convergence table -->"
TASKS = {"markov": "order-2 Markov text", "mlp": "teacher and student, shards unlike"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="markov,mlp")
    parser.add_argument("--algorithms", default="all")
    parser.add_argument("--ranks", default="4,8")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figures", type=Path, help="a folder for the charts")
    parser.add_argument("--page", type=Path, help=f"a page with a table between two lines {MARK}")
    options = parser.parse_args()
    curves = run_convergence(
        options.tasks.split(","),
        parse_algorithms([options.algorithms]),
        [int(each) for each in options.ranks.split(",")],
        options.steps,
        on_progress=lambda what: print(what, file=sys.stderr, flush=True),
    )
    print(table(curves))
    if options.json:
        options.json.write_text(to_json(curves))
    if options.figures:
        for (task, ranks), together in by_world(curves).items():
            (options.figures / f"convergence-{task}-{ranks}.svg").write_text(chart(task, ranks, together))
    if options.page:
        options.page.write_text(with_table(options.page.read_text(), curves))


def with_table(page: str, curves: Sequence[Curve]) -> str:
    """`page` with another table between its two marks."""
    before, _, after = page.split(MARK)
    return f"{before}{MARK}\n{table(curves)}\n\n{beyond(curves)}\n{MARK}{after}"


def by_world(curves: Sequence[Curve]) -> dict[tuple[str, int], list[Curve]]:
    worlds: dict[tuple[str, int], list[Curve]] = {}
    for curve in curves:
        worlds.setdefault((curve.task, curve.ranks), []).append(curve)
    return worlds


def table(curves: Sequence[Curve]) -> str:
    """Markdown: a row an algorithm, a column a world; in brackets the ratio to all-reduce's loss."""
    worlds = by_world(curves)
    header = ["algorithm", *(f"{task}, {ranks} ranks" for task, ranks in worlds)]
    rows = [header, ["---", *("---:" for _ in worlds)]]
    for name in dict.fromkeys(curve.algorithm for curve in curves):
        cells = [next(curve for curve in together if curve.algorithm == name) for together in worlds.values()]
        rows.append([f"`{name}`", *(f"{each.final:.4f} ({each.ratio:.3f})" for each in cells)])
    rows.append(["floor", *(f"{together[0].floor:.4f}" for together in worlds.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def beyond(curves: Sequence[Curve]) -> str:
    """In a sentence: which curves end further above all-reduce's than they should."""
    worlds: dict[str, list[str]] = {}
    for curve in curves:
        if curve.ratio > TOLERANCE:
            worlds.setdefault(f"`{curve.algorithm}`", []).append(f"{curve.task} with {curve.ranks} ranks")
    found = "; ".join(f"{name} ({', '.join(where)})" for name, where in worlds.items()) or "none"
    return f"More than {TOLERANCE - 1:.0%} above all-reduce: {found}."


def chart(task: str, ranks: int, curves: Sequence[Curve]) -> str:
    return LineChart(
        f"{TASKS.get(task, task)}, {ranks} ranks",
        Axis("step"),
        Axis("held-out loss of the mean model", logarithmic=True),
        [Line(curve.algorithm, list(zip(curve.steps, curve.losses, strict=True))) for curve in curves],
        rules=[("floor", curves[0].floor)] if curves[0].floor is not None else [],
    ).to_svg()


if __name__ == "__main__":
    main()
