"""`murmura bench compressors`: what fewer bytes cost in time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from murmura.benchmarks.compressors import CompressorsReport, CompressorsSpec, run_compressors
from murmura.benchmarks.sizes import format_size, parse_size
from murmura.cli.bench import MIN_COLUMNS, PLAIN_COLUMNS, check_writable, write
from murmura.cli.bench_ddp import showing_stages
from murmura.cli.failures import told_plainly
from murmura.cli.tables import digits


def compressors(
    size: Annotated[str, typer.Option(help="Length of the tensors in memory.", metavar="SIZE")] = "25MiB",
    cuda_size: Annotated[
        str, typer.Option(help="Length of those on a CUDA device, where there is one.", metavar="SIZE")
    ] = "400MiB",
    seconds: Annotated[float, typer.Option(help="How long to measure each device, all operations together.")] = 3.0,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file too.", metavar="FILE")] = None,
) -> None:
    """Time encoding, decoding, and decoding and adding, beside a copy of the same float32 tensor.

    On the CPU with one thread, and on a CUDA device where there is one. The operations take turns, on buffers that take
    turns too, so that they come from memory. "x copy" says how many times as long as the copy an operation takes;
    "bandwidth" what part of the copy's bandwidth it reaches over the bytes that it must read and write.

    For example: `murmura bench compressors --size 100MiB --json result.json`
    """
    with told_plainly():
        spec = CompressorsSpec(size_bytes=parse_size(size), cuda_size_bytes=parse_size(cuda_size), seconds=seconds)
        if json is not None:
            check_writable(json)
        with showing_stages(list(spec.devices())) as on_progress:
            report = run_compressors(spec, on_progress)
        out = Console()
        out.width = max(MIN_COLUMNS, out.width) if out.is_terminal else PLAIN_COLUMNS
        out.print(compressors_table(report))
        if json is not None:
            write(json, report.to_json())
            out.print(f"written to {json}", highlight=False, markup=False, soft_wrap=True)


def compressors_table(report: CompressorsReport) -> Table:
    """A row an operation."""
    devices = "; ".join(f"{name}: {about}" for name, about in report.devices.items())
    table = Table(
        title=f"compressors, float32 ({report.machine.cpu})",
        caption=f"medians; {devices}",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    for title in ("device", "size", "compressor", "operation"):
        table.add_column(title, no_wrap=True)
    for title in ("µs", "x copy", "bandwidth"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in report.rows:
        table.add_row(
            row.device,
            format_size(row.size_bytes),
            row.compressor,
            row.operation,
            digits(row.microseconds),
            f"{row.times_copy:.2f}",
            f"{row.of_copy_bandwidth:.0%}",
        )
    return table
