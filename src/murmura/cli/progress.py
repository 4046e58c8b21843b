"""How far a benchmark has come, on standard error: a bar on a terminal, a line a size elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import rich.progress
from rich.console import Console

from murmura.benchmarks import AllReduceSpec, Progress, format_size


@contextlib.contextmanager
def showing(spec: AllReduceSpec) -> Iterator[Callable[[Progress], None]]:
    """Show what the function yielded is told."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda progress: _tell_line(console, progress)
        return
    columns = (
        rich.progress.TextColumn("{task.description:>8}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    # No refreshing by itself: a thread that wakes up often would take time from the ranks.
    with rich.progress.Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("starting", total=len(spec.sizes_bytes))

        def show(progress: Progress) -> None:
            description = format_size(progress.size_bytes)
            bar.update(task, description=description, completed=progress.index + progress.fraction, refresh=True)

        yield show


def _tell_line(console: Console, progress: Progress) -> None:
    if progress.fraction == 1:
        console.print(f"{format_size(progress.size_bytes)}: {progress.rounds} rounds", highlight=False)
