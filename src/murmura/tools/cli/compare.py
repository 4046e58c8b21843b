"""`murmura compare`: train one task with every algorithm, and recommend one for each link."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from murmura import ConfigError
from murmura.checkpoint.files import make_folder
from murmura.tools.cli.completion import Algorithms, among
from murmura.tools.cli.failures import exit_on_error
from murmura.tools.cli.output import (
    INTERRUPTED,
    JSON_HELP,
    STANDARD_OUTPUT,
    check_writable,
    digits,
    plain_table,
    print_result,
    showing_progress,
    write,
)
from murmura.tools.experiments import TASKS, parse_algorithms
from murmura.tools.experiments import report as reports
from murmura.tools.experiments.breakdown import readable_bytes
from murmura.tools.experiments.compare_spec import BLOCK_STEPS, ComparisonSpec, parse_link
from murmura.tools.experiments.comparison import Comparison, Row, contradictions, run_comparison
from murmura.tools.experiments.runs import only_writer
from murmura.tools.options import parse_list

COLUMNS = ("contestant", "steps to\ntarget", "seconds to\ntarget", "step\nms", "sent\na step", "final\nloss", "apart")


def command(
    task: Annotated[
        str,
        typer.Option("--task", help=f"Task to train: {', '.join(TASKS)}.", metavar="TASK", autocompletion=among(TASKS)),
    ] = "charlm",
    algorithms: Algorithms = "all",
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Number of ranks.", metavar="N")] = 4,
    bandwidth: Annotated[
        str,
        typer.Option(
            help="Links to compare on, a list of rates (100mbit, 1gbit) and local: shared memory.", metavar="LIST"
        ),
    ] = "100mbit,local",
    steps: Annotated[
        int,
        typer.Option(
            help=f"Steps of each algorithm; rounded up to a multiple of {BLOCK_STEPS} and of every interval.",
            metavar="N",
        ),
    ] = 160,
    target: Annotated[
        float | None,
        typer.Option(
            help="Held-out loss to reach.",
            metavar="LOSS",
            show_default="the lowest reached by every algorithm that finishes within 10 % of all-reduce",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of data and initial weights.", metavar="N")] = 0,
    device: Annotated[
        str,
        typer.Option(
            "--device", help="cpu, or cuda: NCCL ranks that share one GPU, over loopback sockets.", metavar="NAME"
        ),
    ] = "cpu",
    json: Annotated[Path | None, typer.Option(help=JSON_HELP, metavar="FILE")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for runs and report.", metavar="FOLDER", show_default="runs/compare-TASK-TIME"),
    ] = None,
) -> None:
    """Train a task with every algorithm, and with torch's DDP, and say which one to use on which link.

    On each link all contestants train in the same processes, taking turns of a few steps. A named rate is a link
    between hosts that are network namespaces, which needs root and iproute2; where that is not permitted a throttled
    transport stands in, without torch's DDP, and the table says so. With `--device cuda` it always does.

    For example: `murmura compare --algorithms gradient_allreduce,bytegrad,local_sgd --bandwidth 100mbit,1gbit,local`
    """
    with exit_on_error():
        spec = ComparisonSpec(
            task=task,
            algorithms=parse_algorithms(algorithms),
            ranks=ranks,
            links=parse_list(bandwidth, parse_link),
            steps=steps,
            target=target,
            seed=seed,
            device=device,
        )
        if spec.num_steps != steps:
            turns = f"turns of {spec.block_steps} steps, a multiple of {BLOCK_STEPS} and of every algorithm's interval"
            typer.echo(f"--steps={steps} is rounded up to {spec.num_steps}: {turns}.", err=True)
        check_writable(json)
        folder = out if out is not None else Path("runs") / f"compare-{task}-{datetime.now():%Y%m%d-%H%M%S}"
        make_folder(folder, "runs cannot be written to --out")
        if any(folder.iterdir()):
            raise ConfigError(f"--out {folder} is not empty. Name a new folder.")
        try:
            with only_writer(folder), showing_progress(spec.links) as on_progress:
                comparison, runs = run_comparison(spec, folder, on_progress)
        except KeyboardInterrupt:
            typer.echo(f"interrupted; finished links are in {folder}.", err=True)
            raise typer.Exit(INTERRUPTED) from None
        file = folder / "report.html"
        page = [html_table(comparison, link) for link in spec.links]
        title = f"murmura: ways to synchronise {task} with {ranks} ranks"
        write(file, reports.report(title, runs, comparison.recommendations.values(), page))
        tables = [link_table(comparison, link) for link in spec.links]
        print_result(tables, comparison.configurations, json, comparison.to_json())
        if json != STANDARD_OUTPUT:
            for recommendation in comparison.recommendations.values():
                typer.echo(f"\n{recommendation}")
            typer.echo(f"report  {file}")


# The table, for the terminal and for the report


def link_table(comparison: Comparison, link: str) -> Table:
    """Return a row for each contestant on `link`, the fastest first."""
    table = plain_table(heading(comparison, link), caption(comparison, link), COLUMNS)
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
    """Say how the link was made, and whether the step times match the byte formulas."""
    said = f"Link: {comparison.notes[link]}. Apart: how far replicas are from their mean."
    if comparison.spec.block_steps != BLOCK_STEPS:
        said = f"{said} Step: the median over turns of {comparison.spec.block_steps} steps."
    wrong = contradictions(comparison.of_link(link))
    if link == "local":
        return said
    if not wrong:
        return f"{said} Step times come in the order that the byte formulas predict."
    pairs = ", ".join(f"{slow.contestant} is slower than {fast.contestant}" for slow, fast in wrong)
    return f"{said} Against the byte formulas: {pairs}."


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Sort by time to the target; then those that did not reach it, by their loss."""
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
