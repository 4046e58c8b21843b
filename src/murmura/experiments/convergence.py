"""Does an algorithm learn as well as plain all-reduce in the same number of steps? One experiment, one table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from murmura.experiments.recipes import recipe_named
from murmura.experiments.tasks import task_named
from murmura.experiments.training import Training
from murmura.launch import run_world
from murmura.transports.base import Transport

BASELINE = "gradient_allreduce"


@dataclass(frozen=True)
class Curve:
    """How one algorithm did on one task in a world of `ranks`."""

    task: str
    algorithm: str
    ranks: int
    floor: float | None
    steps: list[int]
    losses: list[float]  # of the mean model, held out, at `steps`
    consensus_distance: float
    ratio: float  # of the final loss to all-reduce's

    @property
    def final(self) -> float:
        return self.losses[-1]


def run_convergence(
    tasks: Sequence[str],
    algorithms: Sequence[str],
    ranks: Sequence[int],
    steps: int,
    *,
    evaluations: int = 20,
    on_progress: Callable[[str], None] = lambda what: None,
) -> list[Curve]:
    """A curve for each; all-reduce is always among them, because the others are measured against it."""
    curves = []
    for task in tasks:
        for size in ranks:
            baseline: float | None = None
            for algorithm in dict.fromkeys([BASELINE, *algorithms]):
                on_progress(f"{task}, {size} ranks: {algorithm}")
                points, distance = run_world(
                    _learn, size, task, algorithm, steps, evaluations, kind="processes", timeout=120.0
                )[0]
                final = points[-1][1]
                baseline = final if baseline is None else baseline
                curves.append(
                    Curve(
                        task,
                        algorithm,
                        size,
                        task_named(task).floor,
                        [step for step, _ in points],
                        [loss for _, loss in points],
                        distance,
                        final / baseline,
                    )
                )
    return curves


def to_json(curves: Sequence[Curve]) -> str:
    return json.dumps({"curves": [asdict(curve) for curve in curves]}, indent=1)


def _learn(
    transport: Transport, task: str, algorithm: str, steps: int, evaluations: int
) -> tuple[list[tuple[int, float]], float]:
    torch.set_num_threads(1)
    training = Training(transport, task_named(task), recipe_named(algorithm), steps)
    every = max(1, steps // evaluations)
    points = [(0, training.evaluate())]
    while training.step < steps:
        training.advance()
        if training.step % every == 0 or training.step == steps:
            points.append((training.step, training.evaluate()))
    distance = training.ddp.consensus_distance()
    training.close()
    return points, distance
