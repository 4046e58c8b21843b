"""The `murmura` command: the app that the groups of commands hang on."""

from __future__ import annotations

from typing import Annotated

import typer

from murmura import __version__
from murmura.cli import bench, bench_compressors, bench_ddp, bench_network, compare, doctor, lab, report, run, train

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
bench.app.command("ddp")(bench_ddp.ddp)
bench.app.command("compressors")(bench_compressors.compressors)
bench.app.command("network")(bench_network.network)
app.add_typer(bench.app, name="bench")
app.add_typer(lab.app, name="lab")
app.command()(doctor.doctor)
app.command(context_settings={"allow_interspersed_args": False})(run.run)  # what follows SCRIPT is the script's


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
