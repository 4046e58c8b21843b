"""Record holds the measurements of one step on one rank; it is written as a line of JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

TABLES = ("bytes", "waiting", "logged")
"""The fields of a record that hold several numbers."""


@dataclass(frozen=True)
class Record:
    """Where the time of one step went on one rank.

    wall_ms = compute_ms + waited_ms, and exchange_ms = hidden_ms + the part of waited_ms in which an exchange was under
    way. A field is None if it was not asked for; `waiting` also if the transport does not report it.
    """

    step: int  # DDP's round
    rank: int
    time: float  # seconds since the epoch, at the end of the step
    wall_ms: float  # from the end of the step before
    compute_ms: float  # the training thread did its own work: data, forward, backward, optimizer
    waited_ms: float  # the training thread synchronised: exchange time that is exposed, and copies before and after it
    exchange_ms: float  # tensors were being exchanged, in any thread
    hidden_ms: float  # the part of exchange_ms that overlapped with computation
    bytes: dict[str, int]  # passed to each operation; how much a collective sends depends on the transport
    waiting: dict[int, float] | None = None  # milliseconds in which each peer was waited for, in any thread
    gradient_norm: float | None = None  # of the gradients that the optimizer applied
    consensus_distance: float | None = None  # see DDP.consensus_distance
    logged: dict[str, float] = field(default_factory=dict)  # what the program added with Observer.log

    def to_json(self) -> str:
        """Return one line without the fields that are None; a number that is not finite becomes null."""
        values = {name: _finite(value) for name, value in asdict(self).items() if value is not None}
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Parse a line of `to_json`; null becomes NaN. Raises ValueError or TypeError for any other line."""
        told = json.loads(line)
        if not isinstance(told, dict):
            raise ValueError(f"{told!r} is no record")
        values: dict[str, Any] = _numbers(told)
        for name, value in values.items():
            numbers = value.values() if name in TABLES and isinstance(value, dict) else [value]
            if (name in TABLES and numbers == [value]) or not all(map(_is_number, numbers)):
                raise ValueError(f"{name} cannot be {value!r}")
        if "waiting" in values:
            values["waiting"] = {int(peer): ms for peer, ms in values["waiting"].items()}
        return cls(**values)

    def scalars(self) -> Mapping[str, float]:
        """Return every number by name, nested ones with a slash: "bytes/all_reduce", "waiting/1"."""
        scalars: dict[str, float] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                scalars |= {f"{name}/{key}": each for key, each in value.items()}
            elif value is not None and name not in ("step", "rank", "time"):
                scalars[name] = value
        return scalars


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not abs(value) > sys.float_info.max


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    return math.nan if value is None else value
