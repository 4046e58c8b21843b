"""`murmura bench network`: what each algorithm is worth on a slow link."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from murmura.algorithms import algorithm_names
from murmura.benchmarks.network import run_network
from murmura.benchmarks.network_contestants import BARE
from murmura.benchmarks.network_report import NetworkReport, NetworkRow
from murmura.benchmarks.network_spec import NetworkSpec, parse_network_peers, parse_rates
from murmura.cli.bench import MIN_COLUMNS, PLAIN_COLUMNS, check_writable, write
from murmura.cli.bench_ddp import showing_stages
from murmura.cli.failures import told_plainly
from murmura.cli.tables import digits
from murmura.experiments.recipes import parse_algorithms


def network(
    hosts: Annotated[int, typer.Option(help="How many are simulated; each holds one rank.", metavar="N")] = 4,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Of each host's link, in both directions: a list.", metavar="LIST", show_default="100mbit,1gbit"
        ),
    ] = None,
    algorithms: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Who is measured: {', '.join(algorithm_names())}, or a list.", metavar="LIST", show_default="all"
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Who is measured beside them: torch-ddp, which is torch's DDP on Gloo, as it comes and with its hooks "
            "for fp16 and PowerSGD.",
            metavar="PEERS",
            show_default="torch-ddp",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="How long to measure each rate, all contestants together; 3 rounds in any case.")
    ] = 120.0,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file too.", metavar="FILE")] = None,
) -> None:
    """Time training steps on simulated hosts with slow links, and count what their interfaces send.

    The hosts are network namespaces, so it needs root and iproute2. All contestants train the same MLP of 10 million
    parameters, which computes little, in the same processes, and take turns, round by round. Algorithms that
    communicate once in 20 steps are timed over whole periods. "x torch DDP" says how many times as long torch's DDP
    took.

    For example: `murmura bench network --hosts 4 --rate 100mbit,1gbit --against torch-ddp --json result.json`
    """
    with told_plainly():
        spec = NetworkSpec(
            hosts=hosts,
            rates=parse_rates(["100mbit", "1gbit"] if rate is None else rate),
            algorithms=parse_algorithms(["all"] if algorithms is None else algorithms),
            peers=parse_network_peers(["torch-ddp"] if against is None else against),
            seconds=seconds,
        )
        if json is not None:
            check_writable(json)
        with showing_stages(spec.rates) as on_progress:
            report = run_network(spec, on_progress)
        out = Console()
        out.width = max(MIN_COLUMNS, out.width) if out.is_terminal else PLAIN_COLUMNS
        for each in spec.rates:
            out.print(network_table(report, each))
            out.print()
        if json is not None:
            write(json, report.to_json())
            out.print(f"written to {json}", highlight=False, markup=False, soft_wrap=True)


def network_table(report: NetworkReport, rate: str) -> Table:
    """A row a contestant: its step, how it compares, and what it sends."""
    rows = [row for row in report.rows if row.rate == rate]
    table = Table(
        title=f"{report.spec.hosts} hosts, links of {rate}: {report.spec.model.about}",
        caption=f"{verdict(rows)}\nmedians of the slowest rank, in brackets the quartiles; MB sent by a host in a "
        f"step, after headers; load before the start: {digits(report.load_before)}",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    for place, title in enumerate(("algorithm", "step, ms", "x torch DDP", "MB sent", "by formula", "off by")):
        table.add_column(title, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        first, third = row.quartiles
        table.add_row(
            row.algorithm,
            f"{digits(row.step_ms)} ({digits(first)}-{digits(third)})",
            "-" if row.ratio is None else Text(digits(row.ratio), style="green" if row.ratio > 1 else "red"),
            digits(row.payload_bytes / 1e6),
            digits(row.formula_bytes / 1e6),
            f"{row.bytes_off:+.1%}" if row.formula_bytes else "-",
        )
    return table


def verdict(rows: list[NetworkRow]) -> str:
    """Whom the plain all-reduce of gradients beats at this rate."""
    plain = next((row for row in rows if row.algorithm == "gradient_allreduce"), None)
    if plain is None:
        return "gradient_allreduce was not measured"
    beaten = [row.algorithm for row in rows if row.step_ms > plain.step_ms and row.algorithm != BARE]
    return f"plain gradient_allreduce is faster than {', '.join(beaten) if beaten else 'nobody'} here"
