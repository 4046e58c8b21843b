"""The DDP benchmark: training steps of murmura's DDP beside torch's, and beside the bare module.

`run_ddp` starts the ranks, fresh ones for each stage; `measure` is what they do.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from murmura import ThrottledTransport, Transport
from murmura.tools import ranks
from murmura.tools.bench.checks import check_gradients, check_in_step, expected_gradients
from murmura.tools.bench.harness import Sample, load, slowest, take_share_of_cores, take_turns
from murmura.tools.bench.memory import measure_memory
from murmura.tools.bench.models import MODELS, Model
from murmura.tools.bench.steps import NUM_BATCHES, PHASES, Method, bare, held_back, murmura_ddp, prepare, torch_ddp
from murmura.tools.options import check_seconds, raise_faults
from murmura.tools.progress import PROGRESS, Progress, ProgressFile, Tell, silent, teller, watching

MURMURA, HELD_BACK, TORCH_DDP, BARE = "murmura", "murmura no overlap", "torch-ddp", "bare"
OVERLAPPED, NOT_OVERLAPPED, DEFAULT_BUCKETS = "overlapped", "not overlapped", "default buckets"  # on the slow link
SMALL_BUCKET_BYTES = 2**20  # small enough for the gradients of any model to leave in several parts
BATCH_SECONDS = 0.15  # about what a batch lasts
BATCH_STEPS = (2, 16)
TRIAL_STEPS = 3  # after the first one; in the second both DDPs plan their buckets anew


class StageKind(StrEnum):
    """What is measured of a model, in this order."""

    STEP = "step"
    SLOW_LINK = "slow link"
    MEMORY = "memory"


class Stage(NamedTuple):
    """One thing measured of one model on so many ranks, all contestants together."""

    kind: StageKind
    ranks: int
    model: str

    def __str__(self) -> str:
        kind = "" if self.kind is StageKind.STEP else f", {self.kind}"
        return f"{self.model}, {self.ranks} rank{'s' if self.ranks > 1 else ''}{kind}"


@dataclass(frozen=True, kw_only=True)
class DDPSpec:
    """The specification of the DDP benchmark.

    Attributes:
        ranks: how many processes on this host, one measurement each; one rank is measured in any case.
        models: what they train, by name.
        seconds: how long to measure each model with each number of ranks, all contestants together, and as long again
            on the slow link; a few rounds are measured in any case.
    """

    ranks: tuple[int, ...] = (2, 4)
    models: dict[str, Model] = field(default_factory=lambda: dict(MODELS))
    seconds: float = 10.0

    def __post_init__(self) -> None:
        faults = []
        if not self.ranks or not self.models:
            faults.append("there is nothing to measure. Name at least one number of ranks and one model.")
        if not os.path.exists("/proc/self/smaps_rollup"):
            faults.append("this system does not tell how much memory a process uses. Linux 4.14 or newer does.")
        raise_faults([*faults, *check_seconds(self.seconds)])

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """All that are measured: one rank first, which shows what wrapping alone costs."""
        return tuple(sorted({1, *self.ranks}))

    def stages(self) -> list[Stage]:
        """All that is done, in order; a slow link is as fast as the step before it says."""
        return [
            Stage(kind, count, model)
            for count in self.rank_counts
            for model in self.models
            for kind in (StageKind if count > 1 else (StageKind.STEP,))
        ]


@dataclass
class Measured:
    """What the stages so far have brought; `slow_link` with the rate of the link, `memory` in bytes by contestant."""

    load_before: float
    steps: dict[Stage, list[Sample]] = field(default_factory=dict)
    slow_link: dict[Stage, tuple[str, list[Sample]]] = field(default_factory=dict)
    memory: dict[Stage, dict[str, float]] = field(default_factory=dict)


def run_ddp(spec: DDPSpec, on_progress: Tell = silent) -> Measured:
    """Measure `spec`. `on_progress` is called from a thread, a few times a second.

    Raises a `MurmuraError` if the measurement fails or a contestant computes wrong gradients.
    """
    found = Measured(load())
    with tempfile.TemporaryDirectory(prefix="murmura-bench-") as name, watching(Path(name) / PROGRESS, on_progress):
        for index, stage in enumerate(spec.stages()):
            _add(found, spec, index, stage, Path(name))
    return found


def _add(found: Measured, spec: DDPSpec, index: int, stage: Stage, folder: Path) -> None:
    """Carry out `stage` in new processes, each with a new folder beside the file of progress."""
    what, recipe = f"the measurement of {stage}", spec.models[stage.model]

    def new_folder() -> Path:
        return Path(tempfile.mkdtemp(dir=folder))

    if stage.kind is StageKind.STEP:
        order = (recipe, spec.seconds, index, new_folder())
        found.steps[stage] = ranks.run_here(what, measure_steps, stage.ranks, *order)
    elif stage.kind is StageKind.SLOW_LINK:
        alone = backward_seconds(found.steps[stage._replace(kind=StageKind.STEP)])
        rate = matching_bandwidth(recipe.num_bytes(), stage.ranks, alone)
        link = (recipe, rate, spec.seconds, index, new_folder())
        found.slow_link[stage] = rate, ranks.run_here(what, measure_slow_link, stage.ranks, *link)
    else:
        tell, names = ProgressFile(folder / PROGRESS), [MURMURA, TORCH_DDP, BARE]
        used = found.memory.setdefault(stage, {})
        for place, name in enumerate(names):
            tell(Progress(index, place / len(names)))
            used[name] = ranks.run_here(what, measure_memory, stage.ranks, step_method, recipe, name, new_folder())
        tell(Progress(index, 1.0, len(names)))


def step_names(world_size: int) -> list[str]:
    """Return the contestants of an ordinary step, in the order of the table."""
    return [MURMURA, *([HELD_BACK] if world_size > 1 else []), TORCH_DDP, BARE]


def step_method(name: str, transport: Transport, folder: Path) -> Method:
    """A contestant's way to take an ordinary step; called by every rank. `folder` is shared."""
    if name == MURMURA:
        return murmura_ddp(name, transport)
    if name == HELD_BACK:
        return held_back(name, transport)
    if name == TORCH_DDP:
        return torch_ddp(name, transport, folder / name)
    assert name == BARE, name
    return bare(name)


def slow_link_methods(transport: Transport) -> list[Method]:
    """murmura on a slow link: communicating while backward runs, and after it.

    Both in small buckets, and the first also in those that DDP makes by default: the last bucket leaves when backward
    ends, so what it holds cannot overlap.
    """
    return [
        murmura_ddp(OVERLAPPED, transport, bucket_size_bytes=SMALL_BUCKET_BYTES),
        held_back(NOT_OVERLAPPED, transport, bucket_size_bytes=SMALL_BUCKET_BYTES),
        murmura_ddp(DEFAULT_BUCKETS, transport),
    ]


def measure_steps(transport: Transport, recipe: Model, seconds: float, index: int, folder: Path) -> list[Sample]:
    """Measure all contestants of an ordinary step in this dedicated process; every rank returns the same."""
    take_share_of_cores(transport.world_size)
    methods = [step_method(name, transport, folder) for name in step_names(transport.world_size)]
    return measure(transport, methods, recipe, seconds, index, teller(transport, folder.parent / PROGRESS))


def measure_slow_link(
    transport: Transport, recipe: Model, bandwidth: str, seconds: float, index: int, folder: Path
) -> list[Sample]:
    """murmura over a link of `bandwidth`, against itself without overlap; otherwise as `measure_steps`."""
    take_share_of_cores(transport.world_size)
    tell = teller(transport, folder.parent / PROGRESS)
    with ThrottledTransport(transport.channel("slow link"), bandwidth) as link:
        return measure(transport, slow_link_methods(link), recipe, seconds, index, tell)


def measure(
    transport: Transport,
    methods: Sequence[Method],
    recipe: Model,
    seconds: float,
    index: int = 0,
    tell: Tell = silent,
) -> list[Sample]:
    """Measure every contestant for about `seconds` together; one with a wrong gradient is a `MurmuraError`.

    The ranks meet on `transport`, whatever the contestants use. Progress is told as that of stage `index`.
    """
    tell(Progress(index, 0.0))
    first_batch = recipe.batches(transport.rank, NUM_BATCHES)[0]
    local, mean = expected_gradients(transport, recipe, recipe.build(), first_batch)
    with contextlib.ExitStack() as closing:
        contestants = prepare(transport, methods, recipe)
        trials = []
        for each in contestants:
            closing.callback(each.close)
            each.differentiate()
            check_gradients(each.module, mean if each.method.averages else local, each.name)
            each.finish_step()
            trials.append(slowest(transport, min(each.run_batch(0)[0] for _ in range(TRIAL_STEPS))))
        for each in contestants:
            each.batch = steps_per_batch(min(trials))
        samples = take_turns(transport, contestants, seconds, tell, index)
        for each in contestants:
            if each.method.averages:
                check_in_step(transport, each.module, each.name)
        transport.barrier()  # no rank may leave while a peer still needs it
    return samples


# Plain arithmetic


def steps_per_batch(step_seconds: float) -> int:
    """How many steps of `step_seconds` each to time together."""
    fewest, most = BATCH_STEPS
    return max(fewest, min(most, int(BATCH_SECONDS / step_seconds)))


def backward_seconds(samples: Sequence[Sample]) -> float:
    """Return the time of backward without communication."""
    alone = next(sample for sample in samples if sample.contestant == BARE)
    return statistics.median(alone.by_round(1 + PHASES.index("backward")))


def matching_bandwidth(num_bytes: int, world_size: int, seconds: float) -> str:
    """The rate at which a ring takes `seconds` to all-reduce so many bytes: 2 (n - 1) / n of them leave each rank."""
    sent_bytes = 2 * (world_size - 1) / world_size * num_bytes
    return f"{8 * sent_bytes / seconds / 1e6:.3f}mbit"
