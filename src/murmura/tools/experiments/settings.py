"""The settings of a training run: from flags and a TOML file to one checked object, and back from a run's own file."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from murmura.algorithms.names import PLAIN, algorithm_named
from murmura.errors import ConfigError
from murmura.tools.experiments.tasks import task_named
from murmura.transports.decorators.throttled import parse_rate
from murmura.types import TransportKind, parse

TRANSPORTS = (
    TransportKind.SHARED_MEMORY,
    TransportKind.IN_PROCESS,
    TransportKind.GLOO,
    TransportKind.HIERARCHICAL,
    TransportKind.NCCL,
)
"""The transports of a run: threads for IN_PROCESS, processes of this machine for the others."""

DEVICES = ("cpu", "cuda")

MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The settings of a run; a `ConfigError` names every wrong field."""

    task: str = "charlm"
    ranks: int = 4
    algorithm: str = PLAIN
    steps: int = 400
    transport: str = "shared_memory"
    device: str = "cpu"  # on "cuda" all ranks share one GPU
    bandwidth: str | None = None  # of each rank's link, "100mbit"; None is no limit
    seed: int = 0
    checkpoint_every: int = 50  # in steps; 0 is never, and then the run cannot be resumed

    def __post_init__(self) -> None:
        faults = []
        for field in dataclasses.fields(self):
            value, kinds = getattr(self, field.name), {"int": int, "str": str, "str | None": (str, type(None))}
            if not isinstance(value, kinds[str(field.type)]) or isinstance(value, bool):  # type: ignore[arg-type]
                faults.append(f"{field.name}={value!r} is no {str(field.type).partition(' ')[0]}.")
        if not faults:
            faults = [fault for check in self._checks() if (fault := _fault(check))]
        if faults:
            raise ConfigError(" ".join(faults))

    def _checks(self) -> Sequence[Callable[[], object]]:
        return (
            lambda: task_named(self.task),
            lambda: algorithm_named(self.algorithm),
            lambda: _check_transport(self.transport, self.device),
            lambda: check_device(self.device),
            lambda: None if self.bandwidth is None else parse_rate(self.bandwidth),
            lambda: _check_number("ranks", self.ranks, 1, MAX_RANKS),
            lambda: _check_number("steps", self.steps, 1),
            lambda: _check_number("checkpoint_every", self.checkpoint_every, 0),
            lambda: _check_number("seed", self.seed, 0),
        )

    @property
    def evaluate_every(self) -> int:
        """The interval of evaluations in steps: about twenty in a run."""
        return max(1, self.steps // 20)

    def __str__(self) -> str:
        link = f" at {self.bandwidth}" if self.bandwidth else ""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        device = " on one GPU" if self.device == "cuda" else ""
        return f"{self.task}, {self.algorithm}, {ranks}{device}, {self.transport}{link}"

    def differences(self, given: Mapping[str, Any]) -> list[str]:
        """Return the names in `given` that differ from this run's settings."""
        return [name for name, value in given.items() if getattr(self, name) != value]


NAMES = tuple(field.name for field in dataclasses.fields(TrainSettings))


def merged(config: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings of a TOML file with `flags`; flags that are not None take precedence."""
    return {**(read_toml(config) if config else {}), **{name: v for name, v in flags.items() if v is not None}}


def read_toml(path: Path) -> dict[str, Any]:
    """Read the settings in a file; a `ConfigError` for anything else in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}. Name a TOML file.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path} is no text in UTF-8. Name a TOML file.") from None
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}. Write lines such as: ranks = 4") from None
    unknown = [name for name in found if name not in NAMES]
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise ConfigError(f"--config {path}: {names} is no setting. There are: {', '.join(NAMES)}.")
    return found


def _fault(check: Callable[[], object]) -> str | None:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


def _check_transport(name: str, device: str) -> None:
    kind = parse(TransportKind, name, "transport")
    if kind not in TRANSPORTS:
        raise ConfigError(f"transport={name!r} does not join the ranks of a run. Take {', '.join(TRANSPORTS)}.")
    if kind is TransportKind.NCCL and device != "cuda":
        raise ConfigError("transport='nccl' joins ranks on a GPU. Add device='cuda'.")


def check_device(name: str) -> None:
    if name not in DEVICES:
        raise ConfigError(f"device={name!r} is unknown. Take {' or '.join(DEVICES)}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': this machine has no CUDA device.")


def _check_number(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name}={value}: give a number {bounds}.")
