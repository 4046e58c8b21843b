"""`murmura bench ...`: measure murmura beside its peers on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from murmura import ConfigError, MurmuraError
from murmura.benchmarks import AllReduceSpec, parse_peers, parse_sizes, run_all_reduce
from murmura.cli.failures import told_plainly
from murmura.cli.progress import showing
from murmura.cli.tables import all_reduce_table

MIN_COLUMNS = 80  # in a narrower terminal lines are broken, but no digit is lost
PLAIN_COLUMNS = 120  # where nobody says how wide the output may be

app = typer.Typer(
    help="Measure murmura beside its peers on this machine.", no_args_is_help=True, rich_markup_mode="markdown"
)


@app.callback()
def bench() -> None:
    """Measure murmura beside its peers on this machine."""


@app.command("all-reduce")
def all_reduce(
    ranks: Annotated[int, typer.Option(help="Processes that exchange; all on this machine.")] = 2,
    sizes: Annotated[
        str, typer.Option(help="Lengths of the message: a list in bytes, KiB, MiB or GiB.", metavar="LIST")
    ] = "4KiB,64KiB,1MiB,25MiB,100MiB",
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Who is measured beside murmura: gloo, mpich, or both (gloo,mpich). mpich needs "
            "pip install 'murmura[mpi]'.",
            metavar="PEERS",
            show_default="gloo",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to measure each size, all contestants together.")] = 3.0,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file too.", metavar="FILE")] = None,
) -> None:
    """Time the sum of float32 tensors over all ranks: murmura, and peers in the same processes.

    murmura runs twice: on tensors from transport.allocate(), which need no copy, and on ordinary tensors. Buffers
    are written by their owner before each use and take turns, as gradients do. The contestants take turns too,
    round by round; a time is the median over all rounds of the slowest rank. "x Gloo" says how many times as long
    Gloo took.

    For example: `murmura bench all-reduce --ranks 4 --sizes 4KiB,25MiB --against gloo,mpich --json result.json`
    """
    with told_plainly():
        spec = AllReduceSpec(
            ranks=ranks,
            sizes_bytes=tuple(dict.fromkeys(parse_sizes(sizes))),
            peers=parse_peers(["gloo"] if against is None else against),
            seconds=seconds,
        )
        if json is not None:
            check_writable(json)
        with showing(spec) as on_progress:
            report = run_all_reduce(spec, on_progress)
        out = Console()
        out.width = max(MIN_COLUMNS, out.width) if out.is_terminal else PLAIN_COLUMNS
        out.print(all_reduce_table(report))
        if json is not None:
            write(json, report.to_json())
            out.print(f"written to {json}", highlight=False, markup=False, soft_wrap=True)


def check_writable(path: Path, option: str = "--json") -> None:
    """Raise a ConfigError if a file cannot be written at `path`; nothing is written yet."""
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder. Name a file in it.")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}. Make it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written. Choose another place.")


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MurmuraError(f"{path} cannot be written: {error.strerror}.") from error
