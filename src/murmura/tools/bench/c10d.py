"""The benchmark of the torch.distributed backend: the same calls on murmura's group and on Gloo's."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist

from murmura import Transport
from murmura.tools import ranks
from murmura.tools.bench.c10d_contestants import (
    ALLOCATED,
    BARE,
    GLOO,
    MURMURA,
    NEW,
    OPERATIONS,
    prepare_calls,
    prepare_steps,
)
from murmura.tools.bench.harness import Report, Sample, load, take_share_of_cores, take_turns
from murmura.tools.bench.sizes import format_size
from murmura.tools.options import check_seconds, raise_faults
from murmura.tools.progress import PROGRESS, Progress, Tell, silent, teller, watching

STEPS = (("DDP step", 4), ("DDP step", 64), ("FSDP2 step", 4), ("FSDP2 step", 64))


class Stage(NamedTuple):
    """One call at one size, or one kind of step with one batch."""

    operation: str
    size: int

    @property
    def is_step(self) -> bool:
        return self.operation not in OPERATIONS

    def __str__(self) -> str:
        return f"{self.operation}, {f'batch {self.size}' if self.is_step else format_size(self.size)}"


@dataclass(frozen=True, kw_only=True)
class C10dSpec:
    """The specification of the benchmark.

    Attributes:
        ranks: processes on this host.
        sizes_bytes: of the tensors, each a multiple of 4 bytes times the ranks.
        seconds: how long to measure each stage, all contestants together; a few rounds are measured in any case.
        steps: whether training steps are measured too.
    """

    ranks: int = 2
    sizes_bytes: tuple[int, ...] = (4 * 2**10, 2**20, 25 * 2**20)
    seconds: float = 3.0
    steps: bool = True

    def __post_init__(self) -> None:
        faults = []
        if self.ranks < 2:
            faults.append(f"{self.ranks} rank(s) have nobody to exchange with. Ask for 2 or more.")
        faults += [
            f"{size} bytes cannot be cut into {self.ranks} parts of whole float32 elements. Take a multiple of "
            f"{4 * self.ranks}."
            for size in self.sizes_bytes
            if size < 4 * self.ranks or size % (4 * self.ranks)
        ]
        raise_faults([*faults, *check_seconds(self.seconds)])

    def stages(self) -> list[Stage]:
        calls = [Stage(operation, size) for operation in OPERATIONS for size in self.sizes_bytes]
        return [*calls, *(Stage(*each) for each in STEPS)] if self.steps else calls


@dataclass(frozen=True)
class Row:
    """One contestant of one stage; the module's docstring explains the fields."""

    operation: str
    size: int
    contestant: str
    microseconds: float
    quartiles: tuple[float, float]
    rounds: int
    batch: int
    ratio: float | None


@dataclass(frozen=True, kw_only=True)
class C10dReport(Report[C10dSpec]):
    """The finished benchmark."""

    benchmark: ClassVar[str] = "c10d"

    rows: tuple[Row, ...]

    def rows_of(self, stage: Stage) -> dict[str, Row]:
        return {row.contestant: row for row in self.rows if (row.operation, row.size) == stage}

    def fields(self) -> dict[str, Any]:
        return {
            "ranks": self.spec.ranks,
            "seconds_per_stage": self.spec.seconds,
            "rows": [asdict(row) for row in self.rows],
        }


def run_c10d(spec: C10dSpec, on_progress: Tell = silent) -> C10dReport:
    """Measure `spec`. `on_progress` is called from a thread, a few times a second."""
    load_before = load()
    with tempfile.TemporaryDirectory(prefix="murmura-bench-") as name:
        folder = Path(name)
        with watching(folder / PROGRESS, on_progress):
            samples = ranks.run_here("the measurement", measure_as_rank, spec.ranks, spec, folder)
    about = {each.contestant: each.about for of_stage in samples.values() for each in of_stage}
    rows = tuple(row for stage, of_stage in samples.items() for row in _rows(Stage(*stage), of_stage))
    return C10dReport(spec=spec, contestants=about, load_before=load_before, rows=rows)


def measure_as_rank(transport: Transport, spec: C10dSpec, folder: Path) -> dict[Stage, list[Sample]]:
    """Measure `spec` in this dedicated process; every rank returns the same."""
    take_share_of_cores(spec.ranks)
    gc.disable()
    tell = teller(transport, folder / PROGRESS)
    dist.init_process_group(
        GLOO, init_method=f"file://{folder}/store", rank=transport.rank, world_size=transport.world_size
    )
    try:
        groups = {GLOO: dist.group.WORLD, MURMURA: dist.new_group(backend=MURMURA)}
        samples = {}
        for index, stage in enumerate(spec.stages()):
            tell(Progress(index, 0.0))
            prepare = prepare_steps if stage.is_step else prepare_calls
            contestants = prepare(transport, groups, stage.operation, stage.size)
            samples[stage] = take_turns(transport, contestants, spec.seconds, tell, index)
            del contestants
            gc.collect()
        transport.barrier()  # no rank may leave while a peer still needs it
        return samples
    finally:
        dist.destroy_process_group()


def _rows(stage: Stage, samples: Sequence[Sample]) -> list[Row]:
    gloo = next(each for each in samples if each.contestant == GLOO)
    return [
        Row(
            operation=stage.operation,
            size=stage.size,
            contestant=each.contestant,
            microseconds=each.seconds * 1e6,
            quartiles=each.quartiles(1e6),
            rounds=each.rounds,
            batch=each.batch,
            ratio=gloo.seconds / each.seconds if each.contestant in (MURMURA, NEW, ALLOCATED, BARE) else None,
        )
        for each in samples
    ]
