"""The DDP benchmark: training steps of murmura's DDP beside torch's, and beside the bare module.

`run_ddp` starts the ranks, fresh ones for each stage, and returns a `DDPReport`; `ddp_measure` and `ddp_memory` are
what the ranks do, `ddp_contestants` who competes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from murmura import MurmuraError, run_world
from murmura.benchmarks.ddp_contestants import BARE, MURMURA
from murmura.benchmarks.ddp_measure import backward_seconds, matching_bandwidth, measure_slow_link, measure_steps
from murmura.benchmarks.ddp_memory import measure_memory
from murmura.benchmarks.ddp_report import DDPReport, MemoryRow, StepRow, memory_rows, now, step_rows
from murmura.benchmarks.ddp_spec import DDPSpec, Stage, StageKind
from murmura.benchmarks.models import Model
from murmura.benchmarks.progress import Progress, ProgressFile, silent, watching
from murmura.benchmarks.report import Machine

WAIT_SECONDS = 120.0  # the deadline of each wait of a rank for another


def run_ddp(spec: DDPSpec, on_progress: Callable[[Progress], None] = silent) -> DDPReport:
    """Measure `spec`. `on_progress` is called from a thread, a few times a second.

    Raises a `MurmuraError` if the measurement fails or a contestant computes wrong gradients.
    """
    load_before, *_ = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="murmura-bench-") as name, watching(Path(name) / "progress", on_progress):
        done = _Stages(spec, Path(name))
        for index, stage in enumerate(spec.stages()):
            done.add(index, stage)
    return DDPReport(
        spec,
        now(),
        Machine.here(),
        load_before,
        done.about,
        tuple(done.steps),
        tuple(done.slow_link),
        tuple(done.memory),
    )


class _Stages:
    """What the stages so far have brought."""

    def __init__(self, spec: DDPSpec, folder: Path) -> None:
        self.about: dict[str, str] = {}
        self.steps: list[StepRow] = []
        self.slow_link: list[StepRow] = []
        self.memory: list[MemoryRow] = []
        self._spec = spec
        self._folder = folder
        self._backward_seconds = 0.0  # of the bare module, in the last stage of ordinary steps

    def add(self, index: int, stage: Stage) -> None:
        """Carry out `stage`."""
        spec, recipe = self._spec, self._spec.models[stage.model]
        if stage.kind is StageKind.STEP:
            samples = self._run(stage, measure_steps, recipe, spec.peers, spec.seconds, index)
            self.about |= {sample.contestant: sample.about for sample in samples}
            self.steps += step_rows(stage, samples)
            self._backward_seconds = backward_seconds(samples)
        elif stage.kind is StageKind.SLOW_LINK:
            bandwidth = matching_bandwidth(recipe.num_bytes(), stage.ranks, self._backward_seconds)
            samples = self._run(stage, measure_slow_link, recipe, bandwidth, spec.seconds, index)
            self.about |= {sample.contestant: sample.about for sample in samples}
            self.slow_link += step_rows(stage, samples, bandwidth)
        else:
            self.memory += memory_rows(stage, self._memory(index, stage, recipe))

    def _memory(self, index: int, stage: Stage, recipe: Model) -> dict[str, float]:
        """The bytes of a rank under each contestant, each in ranks of its own."""
        names = [MURMURA, *self._spec.peers, BARE]
        tell = ProgressFile(self._folder / "progress")
        used: dict[str, float] = {}
        for place, name in enumerate(names):
            tell(Progress(index, recipe.num_bytes(), place / len(names)))
            used[name] = self._run(stage, measure_memory, recipe, name)
        tell(Progress(index, recipe.num_bytes(), 1.0, len(names)))
        return used

    def _run(self, stage: Stage, measure: Callable[..., Any], *args: Any) -> Any:
        """What `measure` returns on rank 0 of new processes, which meet in a new folder beside the file of progress."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            told = run_world(measure, stage.ranks, *args, folder, kind="processes", timeout=WAIT_SECONDS)
        except MurmuraError:
            raise
        except (RuntimeError, OSError) as error:  # a peer's own error
            raise MurmuraError(f"the measurement of {stage} failed: {error}") from error
        return told[0]
