"""The `murmura` command, with all its sub-commands."""

from __future__ import annotations

from typing import Annotated

import typer

from murmura import ConfigError, __version__
from murmura.algorithms import algorithm_named, algorithm_names
from murmura.tools.cli import bench, compare, doctor, lab, migrate, report, run, train
from murmura.tools.experiments.recipes import described

app = typer.Typer(
    name="murmura",
    help="Keeps the replicas of a PyTorch model together while they train.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("train")(train.command)
app.command("compare")(compare.command)
app.command("report")(report.command)
app.command("migrate")(migrate.command)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")
app.command()(doctor.doctor)
app.command(context_settings={"allow_interspersed_args": False})(run.run)  # what follows SCRIPT is the script's


@app.command()
def algorithms() -> None:
    """List the names of algorithms, and the configuration that each means everywhere.

    For example: `murmura algorithms`
    """
    width = max(map(len, algorithm_names()))
    for name in algorithm_names():
        try:
            meaning = described(algorithm_named(name))
        except ConfigError as error:  # of one package; the others are listed all the same
            meaning = f"cannot be used: {error}"
        typer.echo(f"{name:{width}}  {meaning}")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"murmura {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Keeps the replicas of a PyTorch model together while they train."""
