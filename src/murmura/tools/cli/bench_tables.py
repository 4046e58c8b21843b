"""Format the reports of benchmarks as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rich.table import Table
from rich.text import Text

from murmura.algorithms.names import PLAIN
from murmura.tools.bench.all_reduce import AllReduceReport
from murmura.tools.bench.c10d import C10dReport
from murmura.tools.bench.c10d_contestants import ALLOCATED as GROUP_ALLOCATED
from murmura.tools.bench.c10d_contestants import BARE as NO_GROUP
from murmura.tools.bench.c10d_contestants import NEW
from murmura.tools.bench.compressors import CompressorsReport
from murmura.tools.bench.cuda_ddp import CudaDDPReport, CudaStep
from murmura.tools.bench.ddp import BARE, DEFAULT_BUCKETS, HELD_BACK, MURMURA, NOT_OVERLAPPED, OVERLAPPED, TORCH_DDP
from murmura.tools.bench.ddp_report import DDPReport, MemoryRow, StepRow
from murmura.tools.bench.network import NetworkReport, NetworkRow
from murmura.tools.bench.network_contestants import BARE as NO_COMMUNICATION
from murmura.tools.bench.sizes import format_size
from murmura.tools.cli.output import digits, plain_table, ratio, spread

TITLES = {"gloo": "Gloo", "mpich": "MPICH", "nccl": "NCCL", "torch-ddp": "torch DDP"}
Row = TypeVar("Row", StepRow, MemoryRow)


def _title(name: str) -> str:
    return TITLES.get(name, name.replace(" ", "\n", 1))


def _grouped(rows: Sequence[Row]) -> list[dict[str, Row]]:
    """Group the rows by model and number of ranks, then by contestant."""
    groups: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.ranks), {})[row.contestant] = row
    return list(groups.values())


def _time(row: StepRow | None) -> str:
    return "-" if row is None else spread(row.milliseconds, row.quartiles)


def all_reduce_table(report: AllReduceReport) -> Table:
    """One row per size: microseconds of all, murmura's GB/s, and the ratio of each peer's time to murmura's."""
    contestants = list(report.contestants)
    peers = [name for name in contestants if name in TITLES]
    murmuras = [name for name in contestants if name not in TITLES]
    best, *_ = murmuras
    order = " / ".join(name.removeprefix("murmura ") for name in murmuras)
    machine = report.machine
    table = plain_table(
        f"all-reduce, sum of float32, {report.spec.ranks} ranks on {machine.cores} cores ({machine.cpu})",
        f"medians of the slowest rank; GB/s: {best}\nratios: murmura {order}",
        ["size", *(f"{_title(name)}\nµs" for name in contestants), "GB/s", *(f"x {TITLES[peer]}" for peer in peers)],
        num_left=0,
    )
    for size in report.spec.sizes_bytes:
        rows = {name: report.row(size, name) for name in contestants}
        table.add_row(
            format_size(size),
            *(digits(row.microseconds) for row in rows.values()),
            digits(rows[best].gb_per_s),
            *(Text(" / ").join(ratio(rows[name].ratio[peer]) for name in murmuras) for peer in peers),
        )
    return table


def c10d_table(report: C10dReport) -> Table:
    """One row per call and size, or step and batch: microseconds of all, and Gloo's time over murmura's."""
    machine = report.machine
    names = [NEW, MURMURA, GROUP_ALLOCATED, "gloo", NO_GROUP]
    table = plain_table(
        f"torch.distributed, {report.spec.ranks} ranks on {machine.cores} cores ({machine.cpu})",
        "medians of the slowest rank; ratios: new tensors / tensors used again / allocated ones; load before: "
        + digits(report.load_before),
        ["what", *(f"{_title(name)}\nµs" for name in names), "x Gloo"],
    )
    for stage in report.spec.stages():
        rows = report.rows_of(stage)
        told = [rows[name].ratio for name in (NEW, MURMURA, GROUP_ALLOCATED) if name in rows]
        table.add_row(
            str(stage),
            *(digits(rows[name].microseconds) if name in rows else "-" for name in names),
            Text(" / ").join(ratio(each) for each in told),
        )
    return table


def compressors_table(report: CompressorsReport) -> Table:
    """One row per operation."""
    devices = "; ".join(f"{name}: {about}" for name, about in report.devices.items())
    columns = ["device", "size", "compressor", "operation", "µs", "x copy", "bandwidth"]
    table = plain_table(f"compressors, float32 ({report.machine.cpu})", f"medians; {devices}", columns, num_left=4)
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


def ddp_tables(report: DDPReport) -> list[Table]:
    """Return the tables of the step, the slow link and the memory that were measured."""
    tables = [steps_table(report)]
    tables += [slow_link_table(report.slow_link)] if report.slow_link else []
    return [*tables, memory_table(report.memory)] if report.memory else tables


def steps_table(report: DDPReport) -> Table:
    """One row per model and number of ranks: milliseconds of all, and their ratios."""
    names = [MURMURA, HELD_BACK, TORCH_DDP, BARE]
    machine = report.machine
    ratios = [f"{TITLES[TORCH_DDP]}\n/ murmura", "murmura\n/ bare", "no overlap\n/ murmura"]
    table = plain_table(
        f"training step on {machine.cores} cores ({machine.cpu}), milliseconds",
        "medians of the slowest rank, in brackets the quartiles; load before the start: " + digits(report.load_before),
        ["model", "ranks x\nthreads", *(_title(name) for name in names), *ratios],
    )
    for rows in _grouped(report.steps):
        own = rows[MURMURA]
        table.add_row(
            own.model,
            f"{own.ranks} x {own.threads}",
            *(_time(rows.get(name)) for name in names),
            ratio(own.ratio[TORCH_DDP]),
            f"{1 / own.ratio[BARE]:.3f}",
            ratio(own.ratio.get(HELD_BACK)),
        )
    return table


def cuda_ddp_table(report: CudaDDPReport) -> Table:
    """One row per model, number of ranks and contestant on a GPU."""
    table = plain_table(
        f"training step on {report.device}: {report.label}, milliseconds",
        "medians of the slowest rank; in brackets, the least and the greatest ratio of a turn",
        ["model", "ranks", "contestant", "step", "host is free", "in a row", "extra MiB", "torch-ddp\n/ this"],
    )
    for row in report.steps:
        times = (row.milliseconds, row.host_milliseconds, row.loop_milliseconds)
        table.add_row(
            row.model,
            str(row.ranks),
            row.contestant,
            *(f"{each:.1f}" for each in times),
            f"{row.extra_mib:+.0f}",
            _ratio_of_turns(row),
        )
    return table


def _ratio_of_turns(row: CudaStep) -> Text:
    if row.ratio_range is None:
        return ratio(row.ratio)
    least, greatest = row.ratio_range
    return ratio(row.ratio).append(f" ({digits(least)}-{digits(greatest)})", style="default")


def slow_link_table(rows: Sequence[StepRow]) -> Table:
    """One row per model and number of ranks: the gain of overlapping."""
    names = [OVERLAPPED, DEFAULT_BUCKETS, NOT_OVERLAPPED]
    table = plain_table(
        "slow link: communication takes about as long as backward, milliseconds",
        "murmura in buckets of 1 MiB, and of default size",
        ["model", "ranks", "link", *(_title(name) for name in names), "not overlapped\n/ overlapped"],
    )
    for group in _grouped(rows):
        own = group[OVERLAPPED]
        rate = f"{float(own.bandwidth.removesuffix('mbit')):.0f} Mbit/s"
        times = (_time(group.get(name)) for name in names)
        table.add_row(own.model, str(own.ranks), rate, *times, ratio(own.ratio[NOT_OVERLAPPED]))
    return table


def memory_table(rows: Sequence[MemoryRow]) -> Table:
    """One row per model and number of ranks: memory of a rank, and what wrapping adds."""
    groups = _grouped(rows)
    names = [name for name in groups[0] if name != BARE]
    columns = ["model", "ranks", "bare", *(f"{TITLES.get(name, name)}\nextra" for name in names)]
    table = plain_table("memory of a rank, MiB", "proportional set size (Pss)", columns)
    for group in groups:
        alone = group[BARE]
        extra = (f"{group[name].extra_bytes / 2**20:+.1f}" for name in names)
        table.add_row(alone.model, str(alone.ranks), f"{alone.bytes / 2**20:.1f}", *extra)
    return table


def network_table(report: NetworkReport, rate: str) -> Table:
    """One row per contestant: its step time, the ratio to torch's DDP, and the bytes it sends."""
    rows = [row for row in report.rows if row.rate == rate]
    table = plain_table(
        f"{report.spec.hosts} hosts, links of {rate}: {report.spec.model.about}",
        f"{slower_than_all_reduce(rows)}\nmedians of the slowest rank, in brackets the quartiles; MB sent by a host in "
        f"a step, after headers; load before the start: {digits(report.load_before)}",
        ["algorithm", "step, ms", "x torch\nDDP", "CPU,\nms", "MB\nsent", "by\nformula", "off by", "MB in\nflight"],
    )
    for row in rows:
        table.add_row(
            row.algorithm,
            spread(row.step_ms, row.quartiles),
            ratio(row.ratio),
            digits(row.cpu_ms),
            digits(row.payload_bytes / 1e6),
            digits(row.formula_bytes / 1e6),
            f"{row.bytes_off:+.1%}" if row.formula_bytes else "-",
            digits(row.in_flight_bytes / 1e6) if row.in_flight_bytes else "-",
        )
    return table


def slower_than_all_reduce(rows: list[NetworkRow]) -> str:
    """Name the contestants that are slower than plain all-reduce at this rate."""
    plain = next((row for row in rows if row.algorithm == PLAIN), None)
    if plain is None:
        return f"{PLAIN} was not measured"
    beaten = [row.algorithm for row in rows if row.step_ms > plain.step_ms and row.algorithm != NO_COMMUNICATION]
    return f"plain {PLAIN} is faster than {', '.join(beaten) if beaten else 'nobody'} here"
