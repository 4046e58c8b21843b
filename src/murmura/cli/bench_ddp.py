"""`murmura bench ddp`: training steps of murmura's DDP beside torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import rich.progress
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from murmura.benchmarks import Progress
from murmura.benchmarks.ddp import run_ddp
from murmura.benchmarks.ddp_contestants import BARE, DEFAULT_BUCKETS, HELD_BACK, MURMURA, NOT_OVERLAPPED, OVERLAPPED
from murmura.benchmarks.ddp_report import DDPReport, MemoryRow, StepRow
from murmura.benchmarks.ddp_spec import DDPSpec, parse_ddp_peers, parse_ranks
from murmura.benchmarks.models import MODELS, parse_models
from murmura.cli.bench import MIN_COLUMNS, PLAIN_COLUMNS, check_writable, write
from murmura.cli.failures import told_plainly
from murmura.cli.tables import digits

TITLES = {"torch-ddp": "torch DDP"}


def ddp(
    ranks: Annotated[
        str,
        typer.Option(help="How many processes train together: a list. One alone is always measured.", metavar="LIST"),
    ] = "2,4",
    models: Annotated[
        list[str] | None,
        typer.Option(help=f"What they train: {', '.join(MODELS)}, or a list.", metavar="LIST", show_default="all"),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Who is measured beside murmura: torch-ddp, which is torch's DDP on Gloo.",
            metavar="PEERS",
            show_default="torch-ddp",
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(help="How long to measure each model with each number of ranks, all contestants together."),
    ] = 10.0,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file too.", metavar="FILE")] = None,
) -> None:
    """Time training steps (forward, backward, optimizer) of murmura's DDP and of torch's in the same processes.

    Both train the same model on the same data, one torch thread a rank; so do murmura with nothing in flight during
    backward, and the bare module, which communicates nothing. They take turns, round by round; a time is the median
    over all rounds of the slowest rank. Then the gain of overlap is measured on a link so slow that communication takes
    about as long as backward, and the memory that a rank uses, in processes of their own.

    For example: `murmura bench ddp --ranks 2,4 --models charlm --seconds 20 --json result.json`
    """
    with told_plainly():
        names = parse_models(MODELS if models is None else models)
        spec = DDPSpec(
            ranks=parse_ranks(ranks),
            models={name: MODELS[name] for name in names},
            peers=parse_ddp_peers(["torch-ddp"] if against is None else against),
            seconds=seconds,
        )
        if json is not None:
            check_writable(json)
        with showing_stages([str(stage) for stage in spec.stages()]) as on_progress:
            report = run_ddp(spec, on_progress)
        out = Console()
        out.width = max(MIN_COLUMNS, out.width) if out.is_terminal else PLAIN_COLUMNS
        for table in tables_of(report):
            out.print(table)
            out.print()
        if json is not None:
            write(json, report.to_json())
            out.print(f"written to {json}", highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def showing_stages(names: Sequence[str]) -> Iterator[Callable[[Progress], None]]:
    """Show on standard error what the function yielded is told: a bar on a terminal, a line a stage elsewhere."""
    console = Console(stderr=True)

    def tell_line(progress: Progress) -> None:
        if progress.fraction == 1:
            console.print(f"{names[progress.index]}: {progress.rounds} rounds", highlight=False)

    if not console.is_terminal:
        yield tell_line
        return
    columns = (
        rich.progress.TextColumn(f"{{task.description:>{max(map(len, names))}}}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    # No refreshing by itself: a thread that wakes up often would take time from the ranks.
    with rich.progress.Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("starting", total=len(names))
        yield lambda progress: bar.update(
            task, description=names[progress.index], completed=progress.index + progress.fraction, refresh=True
        )


# Tables


def tables_of(report: DDPReport) -> list[Table]:
    """The step, the slow link and the memory, as far as they were measured."""
    tables = [steps_table(report)]
    if report.slow_link:
        tables.append(slow_link_table(report.slow_link))
    if report.memory:
        tables.append(memory_table(report.memory))
    return tables


def steps_table(report: DDPReport) -> Table:
    """A row a model and number of ranks: everybody's milliseconds, and how they compare."""
    peers = report.spec.peers
    names = [MURMURA, HELD_BACK, *peers, BARE]
    machine = report.machine
    table = _table(
        f"training step, one thread a rank on {machine.cores} cores ({machine.cpu}), milliseconds",
        "medians of the slowest rank, in brackets the quartiles; load before the start: " + digits(report.load_before),
        ["model", "ranks", *(_title(name) for name in names)],
        [*(f"{TITLES[peer]}\n/ murmura" for peer in peers), "murmura\n/ bare", "no overlap\n/ murmura"],
    )
    for rows in _grouped(report.steps):
        own = rows[MURMURA]
        table.add_row(
            own.model,
            str(own.ranks),
            *(_time(rows.get(name)) for name in names),
            *(_ratio(own.ratio[peer]) for peer in peers),
            f"{1 / own.ratio[BARE]:.3f}",
            _ratio(own.ratio.get(HELD_BACK)),
        )
    return table


def slow_link_table(rows: Sequence[StepRow]) -> Table:
    """A row a model and number of ranks: what overlap gains."""
    names = [OVERLAPPED, DEFAULT_BUCKETS, NOT_OVERLAPPED]
    table = _table(
        "slow link: communication takes about as long as backward, milliseconds",
        "murmura in buckets of 1 MiB, and of default size",
        ["model", "ranks", "link", *(_title(name) for name in names)],
        ["not overlapped\n/ overlapped"],
    )
    for group in _grouped(rows):
        own = group[OVERLAPPED]
        rate = f"{float(own.bandwidth.removesuffix('mbit')):.0f} Mbit/s"
        times = (_time(group.get(name)) for name in names)
        table.add_row(own.model, str(own.ranks), rate, *times, _ratio(own.ratio[NOT_OVERLAPPED]))
    return table


def memory_table(rows: Sequence[MemoryRow]) -> Table:
    """A row a model and number of ranks: what each rank uses, and what wrapping adds."""
    groups: dict[tuple[str, int], dict[str, MemoryRow]] = {}
    for row in rows:
        groups.setdefault((row.model, row.ranks), {})[row.contestant] = row
    names = [name for name in next(iter(groups.values())) if name != BARE]
    table = _table(
        "memory of a rank, MiB",
        "proportional set size (Pss)",
        ["model", "ranks", "bare", *(f"{TITLES.get(name, name)}\nextra" for name in names)],
        [],
    )
    for (model, ranks), group in groups.items():
        extra = (f"{group[name].extra_bytes / 2**20:+.1f}" for name in names)
        table.add_row(model, str(ranks), f"{group[BARE].bytes / 2**20:.1f}", *extra)
    return table


def _table(title: str, caption: str, columns: Sequence[str], ratios: Sequence[str]) -> Table:
    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False
    )
    for place, column in enumerate([*columns, *ratios]):
        table.add_column(column, justify="right" if place else "left", vertical="bottom", no_wrap=True)
    return table


def _title(name: str) -> str:
    return TITLES.get(name, name.replace(" ", "\n", 1))


def _grouped(rows: Sequence[StepRow]) -> list[dict[str, StepRow]]:
    """The rows of each model and number of ranks, by contestant."""
    groups: dict[tuple[str, int], dict[str, StepRow]] = {}
    for row in rows:
        groups.setdefault((row.model, row.ranks), {})[row.contestant] = row
    return list(groups.values())


def _time(row: StepRow | None) -> str:
    if row is None:
        return "-"
    first, third = row.quartiles
    return f"{digits(row.milliseconds)} ({digits(first)}-{digits(third)})"


def _ratio(ratio: float | None) -> Text:
    """Green where murmura is faster."""
    return Text("-") if ratio is None else Text(digits(ratio), style="green" if ratio > 1 else "red")
