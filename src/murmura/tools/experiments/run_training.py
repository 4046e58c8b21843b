"""Run a training from its settings: `train` starts the ranks, and each calls `train_as_rank`."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from murmura.checkpoint import Checkpointer
from murmura.checkpoint.stateful import Stateful
from murmura.errors import ConfigError, MurmuraError
from murmura.launch import run_world
from murmura.observe import JSONLines, Observer, merge_traces
from murmura.tools.experiments.loop import Training
from murmura.tools.experiments.runs import FAILED, FINISHED, INTERRUPTED, RUNNING, RunFolder, described
from murmura.tools.experiments.settings import TrainSettings
from murmura.tools.experiments.tasks import task_named
from murmura.tools.one_gpu import OneGPU
from murmura.transports.base import Transport
from murmura.transports.decorators.throttled import ThrottledTransport
from murmura.types import TransportKind

KEEP = 3  # checkpoints
STEP_SECONDS = 60.0  # a run whose steps take longer is considered hung


@dataclass(frozen=True)
class Outcome:
    """The result of a run, equal on all ranks."""

    loss: float  # of the mean model, held out
    consensus_distance: float
    seconds: float  # since the ranks connected
    steps_taken: int  # since then


def first_step(folder: RunFolder) -> int:
    """Return the step of a run's newest checkpoint, to resume from; a `ConfigError` if there is none."""
    latest = Checkpointer(folder.checkpoints).latest() if folder.checkpoints.is_dir() else None
    if latest is None:
        raise ConfigError(f"the run in {folder.path} has left no checkpoint, so it cannot be resumed. Start a new one.")
    return latest


def train(settings: TrainSettings, folder: RunFolder, *, start: int = 0, trace: Path | None = None) -> Outcome:
    """Run a training, or resume it from the checkpoint of step `start`; must be called in the main thread.

    Whatever ends it, run.json says so before the exception comes out. `trace` is a file for Perfetto.
    """
    kept = folder.checkpoints
    kept.mkdir(exist_ok=True)
    folder.forget_after(start)
    folder.write(described(settings, RUNNING))
    traces = folder.path / "trace" if trace is not None else None
    threads = torch.get_num_threads()
    try:
        if settings.transport == TransportKind.IN_PROCESS:
            torch.set_num_threads(1)
            outcomes = run_world(train_as_rank, settings.ranks, settings, folder, start, traces)
        elif settings.transport == TransportKind.NCCL:
            with OneGPU(settings.ranks) as gpu:
                outcomes = gpu.run(train_as_rank, settings, folder, start, traces, limit=STEP_SECONDS * settings.steps)
        else:
            outcomes = run_world(
                *(train_as_rank, settings.ranks, settings, folder, start, traces),
                kind="processes",
                transport=settings.transport,
            )
    except BaseException as error:
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
        with contextlib.suppress(MurmuraError):  # on a full disk, say; what ended the training is told in any case
            folder.write(described(settings, status, error=f"{type(error).__name__}: {error}"))
        raise
    finally:
        torch.set_num_threads(threads)
        if trace is not None and traces is not None and any(traces.glob("*.trace.json")):
            merge_traces(traces, trace)
    outcome: Outcome = outcomes[0]
    folder.write(
        described(
            settings,
            FINISHED,
            loss=outcome.loss,
            consensus_distance=outcome.consensus_distance,
            seconds=outcome.seconds,
            floor=task_named(settings.task, settings.seed).floor,
        )
    )
    return outcome


def train_as_rank(
    transport: Transport, settings: TrainSettings, folder: RunFolder, start: int, traces: Path | None
) -> Outcome:
    """Train on one rank."""
    began = time.monotonic()
    if settings.bandwidth is not None:
        transport = ThrottledTransport(transport, settings.bandwidth)
    task = task_named(settings.task, settings.seed)
    training = Training(transport, task, settings.algorithm, settings.steps, settings.device)
    checkpointer = Checkpointer(folder.checkpoints, keep=KEEP)
    parts: dict[str, Stateful] = {"optimizer": training.optimizer, "scheduler": training.scheduler}
    if start:
        checkpointer.load(ddp=training.ddp, step=start, **parts)
        training.step = start
    evaluated: dict[str, float] = {}
    with Observer(training.ddp, [JSONLines(folder.part(start))], trace=traces) as observer:
        if not start:
            with observer.paused():
                observer.log(first_loss=training.evaluate())
        while training.step < settings.steps:
            observer.log(loss=training.advance())
            is_last = training.step == settings.steps
            with observer.paused():
                if is_last or training.step % settings.evaluate_every == 0:
                    evaluated = {"held_out": training.evaluate(), "consensus": training.ddp.consensus_distance()}
                    observer.log(**evaluated)
                every = settings.checkpoint_every
                if every and (is_last or training.step % every == 0):
                    checkpointer.save(training.step, ddp=training.ddp, **parts)
    training.close()
    return Outcome(
        loss=evaluated["held_out"],
        consensus_distance=evaluated["consensus"],
        seconds=time.monotonic() - began,
        steps_taken=settings.steps - start,
    )
