"""`murmura report`: write an HTML report of one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from murmura import ConfigError
from murmura.tools.cli.failures import exit_on_error
from murmura.tools.cli.output import check_writable, write
from murmura.tools.experiments.report import report
from murmura.tools.experiments.runs import Run, runs_in


def command(
    runs: Annotated[list[Path], typer.Argument(help="The folders of runs, or of comparisons.", metavar="RUN...")],
    out: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE")] = Path("report.html"),
) -> None:
    """Draw runs of `murmura train` or `compare` as one HTML file, which opens without a network.

    Loss over time, over steps and over bytes; where each step's time went, on the whole and rank by rank; the settings.
    Runs that go on may be drawn too.

    For example: `murmura report runs/* --out report.html`
    """
    with exit_on_error():
        check_writable(out, "--out")
        found = [Run.read(each) for path in dict.fromkeys(runs) for each in runs_in(path)]
        if not any(run.records for run in found):
            raise ConfigError("none of these runs has taken a step yet. Wait for the first.")
        title = found[0].name if len(found) == 1 else f"{len(found)} runs"
        write(out, report(f"murmura: {title}", found))
    typer.echo(str(out))
