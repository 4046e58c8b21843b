"""The folder of a run: its settings, the records of every rank, and its state.

    run.json                        settings, configuration (what the algorithm's name means), machine, status,
                                    result
    metrics/from-000000000/         rank-0.jsonl, ...: a record for every step (`murmura.observe.Record`)
    metrics/from-000000050/         those after a resumption at step 50, which replace the later ones of the part before
    checkpoints/step-000000050/     see `Checkpointer`

A training writes to a `RunFolder`; a report reads a `Run`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from murmura.checkpoint.files import make_folder
from murmura.checkpoint.lock import FolderLock
from murmura.errors import CheckpointError, ConfigError, MurmuraError
from murmura.observe import Record, read_records
from murmura.tools.experiments.breakdown import TURN_STEPS
from murmura.tools.experiments.machine import Machine
from murmura.tools.experiments.recipes import configuration
from murmura.tools.experiments.settings import TrainSettings

SCHEMA_VERSION = 1
FILE = "run.json"
PART = "from-"
RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other commands from writing into `folder` meanwhile; a `ConfigError` says which process writes there now."""
    lock = FolderLock(folder)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock.writing())
        except CheckpointError as error:
            raise ConfigError(f"{folder}: {error}.") from None
        yield


@dataclass(frozen=True)
class RunFolder:
    """The paths in a run's folder."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make a new folder; a `ConfigError` if it holds a run already or cannot be made."""
        if (path / FILE).exists():
            raise ConfigError(f"{path} holds a run already. Go on with it (--resume {path}), or name another folder.")
        make_folder(path, "a run cannot be written to")
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    def part(self, step: int) -> Path:
        """Return the folder for the records of a start at `step`."""
        return self.metrics / f"{PART}{step:09}"

    def forget_after(self, step: int) -> None:
        """Remove the records of starts after `step`, from which the run resumes."""
        for path in self.metrics.glob(f"{PART}*"):
            if _begin(path) > step:
                shutil.rmtree(path)

    def write(self, run: Mapping[str, Any]) -> None:
        """Replace run.json atomically."""
        partial = self.path / f".{FILE}.partial"
        try:
            partial.write_text(json.dumps({"schema_version": SCHEMA_VERSION, **run}, indent=2) + "\n", encoding="utf-8")
            os.replace(partial, self.path / FILE)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise MurmuraError(f"{self.path / FILE} cannot be written: {error.strerror}.") from error


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder.

    Attributes:
        records: by rank, in the order of steps; of a step that was taken twice, the later one. A rank has at least one.
    """

    name: str
    path: Path
    settings: dict[str, Any]
    configuration: str
    machine: dict[str, Any]
    status: str
    result: dict[str, Any]
    records: Mapping[int, list[Record]] = field(repr=False)

    @property
    def num_ranks(self) -> int:
        return int(self.settings["ranks"])

    @property
    def turn_steps(self) -> int:
        """The steps over which the times of one figure are averaged."""
        return int(self.settings.get("turn_steps", TURN_STEPS))

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read the run in `path`; a `ConfigError` says what is missing or wrong."""
        told = read_run_file(path)
        try:
            records = _records(path / "metrics")
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"the records in {path / 'metrics'} cannot be read: {error}.") from None
        return cls(
            name=told.get("name") or path.absolute().name,
            path=path,
            settings=told["settings"],
            configuration=told.get("configuration") or "",
            machine=told["machine"],
            status=told["status"],
            result=told.get("result") or {},
            records=records,
        )


def runs_in(path: Path) -> list[Path]:
    """The folders of the runs in `path`, the folder of a comparison; of anything else `path` itself."""
    of_comparison = [] if (path / FILE).exists() else sorted(each.parent for each in path.glob(f"*/*/{FILE}"))
    return of_comparison or [path]


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the contents of run.json in `path`; a `ConfigError` if this version cannot read it."""
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}. Name the folder of a run, as `murmura train` printed it.")
    try:
        told: dict[str, Any] = json.loads((path / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} holds no run: there is no {FILE} in it. Name the folder of a run or a comparison."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / FILE} cannot be read: {error}.") from None
    if not isinstance(told, dict) or told.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"{path / FILE} is not of version {SCHEMA_VERSION}, which this murmura reads.")
    if damaged := _damaged(told):
        raise ConfigError(f"{path / FILE} is damaged: {', '.join(damaged)} is missing or wrong.")
    return told


def _damaged(told: Mapping[str, Any]) -> list[str]:
    """The names of what cannot be such in run.json."""
    tables: dict[str, Any] = {name: told.get(name) for name in ("settings", "machine")}
    tables["result"] = told.get("result") or {}
    if wrong := [name for name, each in tables.items() if not isinstance(each, dict)]:
        return wrong
    needed = {"task": str, "ranks": int, "algorithm": str}
    wrong = [f"settings.{name}" for name, kind in needed.items() if not isinstance(tables["settings"].get(name), kind)]
    wrong += [f"machine.{name}" for name, each in tables["machine"].items() if isinstance(each, dict | list)]
    numbers = {name: tables["result"].get(name) for name in ("loss", "floor")}
    wrong += [f"result.{name}" for name, each in numbers.items() if not isinstance(each, int | float | None)]
    return wrong if isinstance(told.get("status"), str) else [*wrong, "status"]


def settings_of(path: Path) -> TrainSettings:
    """Return the settings of the run in `path`, to resume it."""
    told = read_run_file(path)
    try:
        return TrainSettings(**told["settings"])
    except TypeError as error:
        raise ConfigError(f"the run in {path} cannot be resumed: {error}.") from None


def described(settings: TrainSettings, status: str, **result: Any) -> dict[str, Any]:
    """The contents of run.json."""
    return {
        "settings": asdict(settings),
        "configuration": configuration(settings.algorithm, settings.steps),
        "machine": asdict(Machine.here()),
        "status": status,
        "result": result,
    }


def _records(metrics: Path) -> dict[int, list[Record]]:
    records: dict[int, list[Record]] = {}
    for begin, path in sorted((_begin(path), path) for path in metrics.glob(f"{PART}*")):
        for rank, later in read_records(path).items():
            records[rank] = [record for record in records.get(rank, []) if record.step < begin] + later
    return {rank: taken for rank, taken in sorted(records.items()) if taken}


def _begin(part: Path) -> int:
    return int(part.name.removeprefix(PART))
