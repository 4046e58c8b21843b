"""`murmura compare`: every way of synchronising on the same task, and which one to use on which link."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from murmura import ConfigError
from murmura.algorithms import algorithm_names
from murmura.benchmarks.compare_spec import ComparisonSpec, parse_links
from murmura.benchmarks.comparison import Comparison, Row, contradictions, run_comparison
from murmura.cli.bench import MIN_COLUMNS, PLAIN_COLUMNS, check_writable, write
from murmura.cli.bench_ddp import showing_stages
from murmura.cli.completion import among
from murmura.cli.failures import told_plainly
from murmura.cli.tables import digits
from murmura.experiments import TASKS, parse_algorithms
from murmura.experiments import report as reports
from murmura.experiments.breakdown import readable_bytes
from murmura.experiments.runs import make_folder

INTERRUPTED = 130
COLUMNS = ("contestant", "steps to\ntarget", "seconds to\ntarget", "step\nms", "sent\na step", "final\nloss", "apart")


def command(
    task: Annotated[
        str,
        typer.Option(help=f"What is trained: {', '.join(TASKS)}.", metavar="TASK", autocompletion=among(TASKS)),
    ] = "charlm",
    algorithms: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A list of {', '.join(algorithm_names())}; or all.",
            metavar="LIST",
            show_default="all",
            autocompletion=among(["all", *algorithm_names()]),
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="How many train together.", metavar="N")] = 4,
    bandwidth: Annotated[
        list[str] | None,
        typer.Option(
            help="Links to compare on, a list of rates (100mbit, 1gbit) and local: shared memory.",
            metavar="LIST",
            show_default="100mbit,local",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(help="Steps that each takes; rounded up to a multiple of 8.", metavar="N")
    ] = 160,
    target: Annotated[
        float | None,
        typer.Option(
            help="The held-out loss to race for.",
            metavar="LOSS",
            show_default="what all reach that end within 10 % of plain all-reduce",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of data and first weights.", metavar="N")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file too.", metavar="FILE")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for runs and report.", metavar="FOLDER", show_default="runs/compare-TASK-TIME"),
    ] = None,
) -> None:
    """Train a task with every algorithm, and with torch's DDP, and say which one to use on which link.

    On each link all contestants train in the same processes, taking turns of a few steps. A named rate is a link
    between hosts that are network namespaces, which needs root and iproute2; where that is not permitted a throttled
    transport stands in, without torch's DDP, and the table says so.

    For example: `murmura compare --algorithms gradient_allreduce,bytegrad,local_sgd --bandwidth 100mbit,1gbit,local`
    """
    with told_plainly():
        spec = ComparisonSpec(
            task=task,
            algorithms=parse_algorithms(["all"] if algorithms is None else algorithms),
            ranks=ranks,
            links=parse_links(["100mbit,local"] if bandwidth is None else bandwidth),
            steps=steps,
            target=target,
            seed=seed,
        )
        if json is not None:
            check_writable(json)
        folder = out if out is not None else Path("runs") / f"compare-{task}-{datetime.now():%Y%m%d-%H%M%S}"
        make_folder(folder)
        if any(folder.iterdir()):
            raise ConfigError(f"--out {folder} is not empty. Name a new folder.")
        try:
            with showing_stages(spec.links) as on_progress:
                comparison, runs = run_comparison(spec, folder, on_progress)
        except KeyboardInterrupt:
            typer.echo(f"interrupted; links that were finished stand in {folder}.", err=True)
            raise typer.Exit(INTERRUPTED) from None
        console = Console()
        console.width = max(MIN_COLUMNS, console.width) if console.is_terminal else PLAIN_COLUMNS
        for link in spec.links:
            console.print(link_table(comparison, link))
            console.print(f"\n{comparison.verdicts[link]}\n", highlight=False, markup=False)
        file = folder / "report.html"
        tables = [html_table(comparison, link) for link in spec.links]
        title = f"murmura: ways to synchronise {task} with {ranks} ranks"
        write(file, reports.report(title, runs, comparison.verdicts.values(), tables))
        if json is not None:
            write(json, comparison.to_json())
            typer.echo(f"result  {json}")
        typer.echo(f"report  {file}")


# The table, twice


def link_table(comparison: Comparison, link: str) -> Table:
    """A row for each contestant on `link`, the quickest first."""
    table = Table(
        title=heading(comparison, link),
        caption=caption(comparison, link),
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    for place, title in enumerate(COLUMNS):
        table.add_column(title, justify="left" if place == 0 else "right", vertical="bottom", no_wrap=True)
    for row in ordered(comparison.of_link(link)):
        table.add_row(*cells(row))
    return table


def html_table(comparison: Comparison, link: str) -> reports.Table:
    rows = ordered(comparison.of_link(link))
    columns = [title.replace("\n", " ") for title in COLUMNS]
    best = 0 if rows and rows[0].seconds_to_target is not None else None
    return reports.Table(
        heading(comparison, link), columns, [cells(row) for row in rows], caption(comparison, link), best
    )


def heading(comparison: Comparison, link: str) -> str:
    spec = comparison.spec
    return f"{spec.task}, {spec.ranks} ranks, {link}: to a held-out loss of {comparison.target:.3f}"


def caption(comparison: Comparison, link: str) -> str:
    """How the link was made, and whether step times are as the byte formulas say."""
    said = f"Link: {comparison.notes[link]}. Apart: how far replicas are from their mean."
    wrong = contradictions(comparison.of_link(link))
    if link == "local":
        return said
    if not wrong:
        return f"{said} Step times come in the order that the byte formulas predict."
    pairs = ", ".join(f"{slow.contestant} is slower than {fast.contestant}" for slow, fast in wrong)
    return f"{said} Against the byte formulas: {pairs}."


def ordered(rows: Sequence[Row]) -> list[Row]:
    """By time to the target; then those that did not reach it, by their loss."""
    far = float("inf")
    return sorted(
        rows, key=lambda row: (far if row.seconds_to_target is None else row.seconds_to_target, row.final_loss)
    )


def cells(row: Row) -> list[str]:
    return [
        row.contestant,
        "-" if row.steps_to_target is None else str(row.steps_to_target),
        "-" if row.seconds_to_target is None else digits(row.seconds_to_target),
        digits(row.step_ms),
        readable_bytes(row.step_bytes),
        f"{row.final_loss:.4f}",
        f"{row.consensus_distance:.1e}" if row.consensus_distance else "0",
    ]
