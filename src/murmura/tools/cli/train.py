"""`murmura train`: train a built-in task on several ranks, with a live view."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from murmura import ConfigError
from murmura.algorithms import algorithm_names
from murmura.checkpoint import Checkpointer
from murmura.tools.cli.completion import among
from murmura.tools.cli.failures import exit_on_error
from murmura.tools.cli.live_view import showing
from murmura.tools.cli.output import INTERRUPTED, check_writable
from murmura.tools.experiments import TASKS
from murmura.tools.experiments.recipes import configuration
from murmura.tools.experiments.run_training import Outcome, first_step, train
from murmura.tools.experiments.runs import RunFolder, only_writer, settings_of
from murmura.tools.experiments.settings import DEVICES, TRANSPORTS, TrainSettings, merged

DEFAULTS = TrainSettings()


def _setting(name: str, help: str, *flags: str, metavar: str = "N", choices: Iterable[str] | None = None) -> Any:
    """Return the option of a setting; its default is that of `TrainSettings`, unless a TOML file gives another."""
    shown, complete = str(getattr(DEFAULTS, name)), None if choices is None else among(choices)
    flags = flags or (f"--{name.replace('_', '-')}",)  # some versions of typer would name it after its metavar
    return typer.Option(*flags, help=help, metavar=metavar, show_default=shown, autocompletion=complete)


def _one_of(name: str, choices: Iterable[str], metavar: str = "NAME", more: str = "") -> Any:
    return _setting(name, f"{name.capitalize()}: {', '.join(choices)}.{more}", metavar=metavar, choices=choices)


def command(
    task: Annotated[str | None, _one_of("task", TASKS, "TASK")] = None,
    ranks: Annotated[int | None, _setting("ranks", "Number of ranks.", "-n", "--ranks")] = None,
    algorithm: Annotated[str | None, _one_of("algorithm", algorithm_names())] = None,
    steps: Annotated[int | None, _setting("steps", "Number of steps.")] = None,
    transport: Annotated[
        str | None,
        _one_of("transport", TRANSPORTS, more=" Ranks are threads with in_process, otherwise processes."),
    ] = None,
    device: Annotated[
        str | None,
        _one_of("device", DEVICES, "DEVICE", more=" On cuda all ranks share one GPU; nccl can join them."),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Simulated bandwidth of each rank's link: 100mbit, 1gbit.", metavar="RATE", show_default="no limit"
        ),
    ] = None,
    seed: Annotated[int | None, _setting("seed", "Random seed of data and initial weights.")] = None,
    checkpoint_every: Annotated[
        int | None, _setting("checkpoint_every", "Steps between checkpoints; 0 for none.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with any of the settings above, checkpoint_every = 50; flags take precedence."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the run.", metavar="FOLDER", show_default="runs/TASK-ALGORITHM-TIME"),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the run in this folder from its last checkpoint.", metavar="FOLDER")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace that opens in ui.perfetto.dev.")] = None,
) -> None:
    """Train a built-in task with several ranks on this machine, and watch where the time goes.

    charlm is a small transformer that reads Python's own documentation, markov one that reads text of a known entropy,
    mlp a perceptron whose ranks have unlike data. Everything about the run is kept in a folder: settings and result
    (run.json), a record for each step and rank (metrics), checkpoints. Ctrl-C ends all ranks; `--resume` goes on to
    the same bits.

    For example: `murmura train --task charlm --ranks 4 --algorithm bytegrad --bandwidth 100mbit`
    """
    flags: dict[str, Any] = {
        "task": task,
        "ranks": ranks,
        "algorithm": algorithm,
        "steps": steps,
        "transport": transport,
        "device": device,
        "bandwidth": bandwidth,
        "seed": seed,
        "checkpoint_every": checkpoint_every,
    }
    with exit_on_error():
        given = merged(config, flags)
        if trace is not None:
            check_writable(trace, "--trace")
        if resume is not None:
            settings, folder, start = _resumed(resume, given, out)
        else:
            settings, start = TrainSettings(**given), 0
            folder = RunFolder.create(out if out is not None else _new_name(settings))
        try:
            with only_writer(folder.path), showing(settings, folder.part(start), start):
                outcome = train(settings, folder, start=start, trace=trace)
        except KeyboardInterrupt:
            typer.echo(_where_it_stopped(folder), err=True)
            raise typer.Exit(INTERRUPTED) from None
        for line in _summary(settings, folder, outcome, trace):
            typer.echo(line)


def _resumed(path: Path, given: dict[str, Any], out: Path | None) -> tuple[TrainSettings, RunFolder, int]:
    settings = settings_of(path)
    if out is not None:
        raise ConfigError("--out and --resume contradict each other: a run goes on in its own folder. Leave --out out.")
    if others := settings.differences(given):
        told = "; ".join(f"{name} is {getattr(settings, name)!r}, not {given[name]!r}" for name in others)
        raise ConfigError(f"--resume {path}: {told} there. Leave it out, or start a new run.")
    folder = RunFolder(path)
    start = first_step(folder)
    if start >= settings.steps:
        raise ConfigError(f"the run in {path} has taken all its {settings.steps} steps. Start a new one.")
    return settings, folder, start


def _new_name(settings: TrainSettings) -> Path:
    return Path("runs") / f"{settings.task}-{settings.algorithm}-{datetime.now():%Y%m%d-%H%M%S}"


def _where_it_stopped(folder: RunFolder) -> str:
    latest = Checkpointer(folder.checkpoints).latest()
    if latest is None:
        return f"interrupted before the first checkpoint; its files are in {folder.path}."
    path = folder.checkpoints / f"step-{latest:09}"
    return (
        f"interrupted; the last checkpoint is of step {latest}: {path}\n"
        f"go on with: murmura train --resume {shlex.quote(str(folder.path))}"
    )


def _summary(settings: TrainSettings, folder: RunFolder, outcome: Outcome, trace: Path | None) -> list[str]:
    apart = f", replicas {outcome.consensus_distance:.1e} apart" if outcome.consensus_distance else ""
    lines = [
        f"{settings.algorithm}: {configuration(settings.algorithm, settings.steps)}",
        f"held-out loss {outcome.loss:.4f} after {settings.steps} steps; {outcome.steps_taken} steps took "
        f"{outcome.seconds:.1f} s{apart}.",
        f"run     {folder.path}",
    ]
    if trace is not None:
        lines.append(f"trace   {trace} (open it in ui.perfetto.dev)")
    return [*lines, f"look at it: murmura report {shlex.quote(str(folder.path))}"]
