"""Write runs as one self-contained HTML file, without scripts, external fonts or pictures.

A policy in the page forbids the browser to fetch anything. Light and dark follow the reader's own setting.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from murmura.tools.experiments.breakdown import Breakdown, readable_bytes, straggler, wire_bytes
from murmura.tools.experiments.charts import Axis, Line, LineChart, StackedBars
from murmura.tools.experiments.runs import Run

PARTS = ("compute", "hidden exchange", "waited")
WORTH_DRAWING = 5  # points
SMOOTHED = 100  # points that a curve of step times is reduced to
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #d0d7de; --paper: #ffffff; --box: #f6f8fa; --dim: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --faint: #3d444d; --paper: #0d1117; --box: #151b23; --dim: #9198a1; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 1320px; padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; }
h3 { font-size: 15px; margin: 20px 0 4px; }
.dim { color: var(--dim); }
.recommendation { background: var(--box); border-left: 4px solid #4269d0; padding: 10px 16px; margin: 10px 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 16px;
  align-items: start; }
.charts svg { width: 100%; height: auto; border: 1px solid var(--faint); border-radius: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 8px 0 16px; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--dim); padding: 4px 0; caption-side: bottom; }
th, td { padding: 4px 12px; border-bottom: 1px solid var(--faint); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { font-weight: 600; }
tr.best td { font-weight: 600; background: var(--box); }
details { border: 1px solid var(--faint); border-radius: 6px; padding: 8px 16px; margin: 8px 0; }
summary { cursor: pointer; font-weight: 600; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(260px, 1fr)); gap: 2px 24px; margin: 8px 0; }
dl div { display: flex; gap: 8px; }
dt { color: var(--dim); white-space: nowrap; }
dd { margin: 0; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Table:
    """A table of text, the first column left-aligned; row `best` is highlighted."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    best: int | None = None

    def to_html(self) -> str:
        head = "".join(f"<th>{escape(each)}</th>" for each in self.columns)
        rows = []
        for index, row in enumerate(self.rows):
            mark = ' class="best"' if index == self.best else ""
            rows.append(f"<tr{mark}>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>")
        caption = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        title = f"<h3>{escape(self.title)}</h3>" if self.title else ""
        body = "\n".join(rows)
        return f'{title}<div class="scroll"><table>{caption}<tr>{head}</tr>\n{body}</table></div>'


def report(title: str, runs: Sequence[Run], recommendations: Iterable[str] = (), tables: Iterable[Table] = ()) -> str:
    """Return the whole page."""
    parts = [f'<p class="recommendation">{escape(each)}</p>' for each in recommendations]
    parts += [table.to_html() for table in tables]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_place(run), []).append(run)
    for place, together in groups.items():
        parts += [f"<h2>{escape(place)}</h2>", _charts(together)]
    parts += ["<h2>Rank by rank</h2>", *(_details(run, is_open=len(runs) == 1) for run in runs)]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p class="dim">{escape(_about(runs))}</p>
{chr(10).join(parts)}
</body>
</html>
"""


def _about(runs: Sequence[Run]) -> str:
    machines = {tuple(sorted(run.machine.items())): run.machine for run in runs}
    words = [
        f"{m.get('cores')} cores of {m.get('cpu')}, torch {m.get('torch')}, murmura {m.get('murmura')}"
        for m in machines.values()
    ]
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''} on {'; '.join(words)}"


def _place(run: Run) -> str:
    link = run.settings.get("bandwidth")
    return f"{run.settings['task']}, {run.num_ranks} ranks, {link or 'no limit to bandwidth'}"


# All runs together


def _charts(runs: Sequence[Run]) -> str:
    loss = Axis("held-out loss")
    names = _short_names(runs)
    over = (
        ("Loss over time", Axis("seconds in steps"), "seconds"),
        ("Loss over steps", Axis("step"), "steps"),
        ("Loss over bytes", Axis("megabytes sent by a rank", logarithmic=True), "megabytes"),
    )
    floors = {run.result.get("floor") for run in runs} - {None}
    rules = [("least possible", floor) for floor in floors if floor is not None]
    drawn = []
    for title, axis, what in over:
        lines = []
        for name, run in zip(names, runs, strict=True):
            points = [(getattr(point, what), point.loss) for point in _worth_drawing(curve(run))]
            lines.append(Line(name, [point for point in points if point[0] > 0 or not axis.logarithmic]))
        drawn.append(LineChart(title, axis, loss, lines, rules).to_svg())
    bars = [(name, _parts(run)) for name, run in zip(names, runs, strict=True) if run.records]
    parts = [*PARTS, "not split"] if any(len(values) > 3 for _, values in bars) else PARTS
    filled = [(name, [*values, *[0.0] * (len(parts) - len(values))]) for name, values in bars]
    drawn.append(
        StackedBars("Where a step's time goes", "milliseconds: median step of the slowest rank", parts, filled).to_svg()
    )
    return f'<div class="charts">{"".join(drawn)}</div>'


class Point(NamedTuple):
    """A held-out loss, and the steps, seconds and bytes until then."""

    steps: int
    seconds: float  # time in steps, the mean over ranks
    megabytes: float  # sent by a rank, the mean over ranks
    loss: float


def curve(run: Run) -> list[Point]:
    """Return the evaluations, from before the first step to the last."""
    ranks = list(run.records.values())
    points: list[Point] = []
    seconds = megabytes = 0.0
    for together in zip(*ranks, strict=False):  # in a running run some ranks may be a step ahead
        first = together[0]
        if "first_loss" in first.logged:
            points.append(Point(first.step, 0.0, 0.0, first.logged["first_loss"]))
        seconds += statistics.fmean(each.wall_ms for each in together) / 1000
        megabytes += statistics.fmean(wire_bytes(each.bytes, run.num_ranks) for each in together) / 1e6
        if "held_out" in first.logged:
            points.append(Point(first.step + 1, seconds, megabytes, first.logged["held_out"]))
    return points


def _worth_drawing(points: list[Point]) -> list[Point]:
    """Leave out the loss of the untrained model if it would compress the rest of the chart."""
    return points[1:] if len(points) > WORTH_DRAWING else points


def _parts(run: Run) -> list[float]:
    """Return the milliseconds of `PARTS`, or the total as an additional part if they were not measured."""
    step = Breakdown.of_run(run.records, run.num_ranks, run.turn_steps)
    return list(step.parts) if _is_split(run) else [0.0, 0.0, 0.0, step.step_ms]


def _is_split(run: Run) -> bool:
    return any(record.exchange_ms for records in run.records.values() for record in records) or run.num_ranks == 1


def _short_names(runs: Sequence[Run]) -> list[str]:
    """Return the algorithms' names if they are distinct, otherwise the runs'."""
    algorithms = [str(run.settings["algorithm"]) for run in runs]
    return algorithms if len(set(algorithms)) == len(runs) else [run.name for run in runs]


# One run


def _details(run: Run, *, is_open: bool) -> str:
    ranks = {
        rank: Breakdown.of(records, run.num_ranks, turn_steps=run.turn_steps)
        for rank, records in sorted(run.records.items())
        if records
    }
    parts = [_settings(run)]
    if ranks:
        parts += [_rank_table(run, ranks).to_html(), _rank_charts(run, ranks)]
    return f"<details{' open' if is_open else ''}><summary>{escape(run.name)}</summary>{''.join(parts)}</details>"


def _rank_table(run: Run, ranks: dict[int, Breakdown]) -> Table:
    slow = straggler(ranks)
    rows = []
    for rank, each in ranks.items():
        waits = _waited_for(run, rank)
        times = (each.step_ms, each.compute_ms, each.hidden_ms, each.waited_ms)
        cells = [f"{value:.2f}" for value in times] if _is_split(run) else [f"{each.step_ms:.2f}", "", "", ""]
        sent = [readable_bytes(each.step_bytes), f"{readable_bytes(each.bytes_per_second)}/s"]
        rows.append([f"rank {rank}{' (slowest)' if rank == slow else ''}", *cells, *sent, waits])
    columns = ("", "step ms", "compute", "hidden exchange", "waited", "sent a step", "rate", "waits most for")
    caption = (
        f"Medians over turns of {run.turn_steps} steps. Compute and waiting add up to a step; the hidden exchange ran "
        "during compute."
    )
    return Table("", columns, rows, caption)


def _waited_for(run: Run, rank: int) -> str:
    totals: dict[int, float] = {}
    for record in run.records[rank]:
        for peer, ms in (record.waiting or {}).items():
            totals[peer] = totals.get(peer, 0.0) + ms
    if not totals:
        return ""
    most = max(totals, key=lambda peer: totals[peer])
    return f"rank {most}, {totals[most] / len(run.records[rank]):.2f} ms a step"


def _rank_charts(run: Run, ranks: dict[int, Breakdown]) -> str:
    bars = [(f"rank {rank}", each.parts) for rank, each in ranks.items()]
    times = [Line(f"rank {rank}", _thinned(run, rank)) for rank in ranks]
    drawn = [LineChart("Time of a step", Axis("step"), Axis("milliseconds", logarithmic=True), times).to_svg()]
    if _is_split(run):
        drawn.insert(0, StackedBars("Where a step's time goes", "milliseconds", PARTS, bars).to_svg())
    return f'<div class="charts">{"".join(drawn)}</div>'


def _thinned(run: Run, rank: int) -> list[tuple[float, float]]:
    """Return step times, averaged over neighbours if there are many."""
    records = run.records[rank]
    width = -(-len(records) // SMOOTHED)
    groups = [records[begin : begin + width] for begin in range(0, len(records), width)]
    return [(group[-1].step + 1, statistics.fmean(each.wall_ms for each in group)) for group in groups]


def _settings(run: Run) -> str:
    items = []
    for name, value in {
        "folder": run.path,
        "status": run.status,
        **run.settings,
        "configuration": run.configuration,
        **run.result,
    }.items():
        words = "none" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
        items.append(f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(words)}</dd></div>")
    return f"<dl>{''.join(items)}</dl>"
