"""Output of the commands: tables, files, and the progress of a measurement."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import rich.progress
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from murmura import ConfigError, MurmuraError
from murmura.tools.progress import Progress, Tell

MIN_COLUMNS = 80  # in a narrower terminal lines wrap, so that no digit is lost
PLAIN_COLUMNS = 120  # if the output is not a terminal
STANDARD_OUTPUT = Path("-")
JSON_HELP = "Write the result as JSON to this file; - is standard output, and then nothing else is printed there."
INTERRUPTED = 130  # the shell's status for a command that Ctrl-C ended


def digits(value: float) -> str:
    """Format with about three digits: 0.12, 4.56, 78.9, 1234."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def spread(median: float, quartiles: tuple[float, float]) -> str:
    """Format a median with its quartiles."""
    return f"{digits(median)} ({digits(quartiles[0])}-{digits(quartiles[1])})"


def ratio(value: float | None) -> Text:
    """Format a ratio, green if murmura is faster."""
    return Text("-") if value is None else Text(digits(value), style="green" if value > 1 else "red")


def plain_table(title: str, caption: str, columns: Sequence[str], num_left: int = 1) -> Table:
    """Return an empty table whose first `num_left` columns are text."""
    table = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False
    )
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < num_left else "right", vertical="bottom", no_wrap=True)
    return table


def print_result(tables: Iterable[Table], contestants: dict[str, str], json: Path | None, text: str) -> None:
    """Print the tables and a description of each contestant; `text`, the JSON form, is written to `json`."""
    if json == STANDARD_OUTPUT:
        typer.echo(text, nl=False)
        return
    out = Console()
    out.width = max(MIN_COLUMNS, out.width) if out.is_terminal else PLAIN_COLUMNS
    for table in tables:
        out.print(table)
        out.print()
    for name, about in contestants.items():
        out.print(f"{name}: {about}", highlight=False, markup=False, soft_wrap=True)
    if json is not None:
        write(json, text)
        out.print(f"written to {json}", highlight=False, markup=False, soft_wrap=True)


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Raise a ConfigError if a file cannot be written at `path`; nothing is written yet."""
    if path is None or path == STANDARD_OUTPUT:
        return
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder. Name a file in it.")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}. Make it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written. Choose another place.")


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise MurmuraError(f"{path} cannot be written: {error.strerror}.") from error


@contextlib.contextmanager
def showing_progress(stages: Sequence[str]) -> Iterator[Tell]:
    """Yield a function that shows progress on standard error: a bar on a terminal, one line per stage elsewhere."""
    console = Console(stderr=True)

    def tell_line(progress: Progress) -> None:
        if progress.fraction == 1:
            rounds = "1 round" if progress.rounds == 1 else f"{progress.rounds} rounds"
            console.print(f"{stages[progress.stage]}: {rounds}", highlight=False)

    if not console.is_terminal:
        yield tell_line
        return
    columns = (
        rich.progress.TextColumn(f"{{task.description:>{max(map(len, stages))}}}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    # No automatic refresh: its thread would take processor time from the ranks.
    with rich.progress.Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("starting", total=len(stages))
        yield lambda progress: bar.update(
            task, description=stages[progress.stage], completed=progress.stage + progress.fraction, refresh=True
        )
