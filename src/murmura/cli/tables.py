"""Reports as tables for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

from murmura.benchmarks import Report, format_size

TITLES = {"gloo": "Gloo", "mpich": "MPICH"}


def all_reduce_table(report: Report) -> Table:
    """A row a size: everybody's microseconds, murmura's GB/s, and how many times as long each peer took."""
    contestants = list(report.contestants)
    peers = [name for name in contestants if name in TITLES]
    murmuras = [name for name in contestants if name not in TITLES]
    best, *_ = murmuras
    order = " / ".join(name.removeprefix("murmura ") for name in murmuras)
    machine = report.machine
    table = Table(
        title=f"all-reduce, sum of float32, {report.spec.ranks} ranks on {machine.cores} cores ({machine.cpu})",
        caption=f"medians of the slowest rank; GB/s: {best}\nratios: murmura {order}",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    titles = [TITLES.get(name, name.replace(" ", "\n", 1)) + "\nµs" for name in contestants]
    for title in ("size", *titles, "GB/s", *(f"x {TITLES[peer]}" for peer in peers)):
        table.add_column(title, justify="right", vertical="bottom", no_wrap=True)
    for size in report.spec.sizes_bytes:
        rows = {name: report.row(size, name) for name in contestants}
        table.add_row(
            format_size(size),
            *(digits(row.microseconds) for row in rows.values()),
            digits(rows[best].gb_per_s),
            *(_ratios(rows[name].ratio[peer] for name in murmuras) for peer in peers),
        )
    return table


def digits(value: float) -> str:
    """About three digits: 0.12, 4.56, 78.9, 1234."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _ratios(ratios: Iterable[float]) -> Text:
    """Green where murmura is faster."""
    parts = [Text(digits(ratio), style="green" if ratio > 1 else "red") for ratio in ratios]
    return Text(" / ").join(parts)
