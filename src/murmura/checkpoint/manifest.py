"""The manifest of a checkpoint, a JSON file that describes it and holds the checksums of its other files.

A folder `step-<step>` is a complete checkpoint if it holds a manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from murmura.algorithms import AlgorithmImpl
from murmura.checkpoint.files import Checksum
from murmura.errors import CheckpointError

FILE = "manifest.json"
FORMAT = 1
PARTIALS = ".step-*.partial"
"""Matches the names of folders that are being written or removed."""

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Manifest:
    """The contents of `manifest.json`.

    Attributes:
        replicas: "equal" if the algorithm keeps them equal, "differ" if each rank trains its own weights.
        parts: the names of what was saved beside the model: optimizer, scheduler, sampler, ...
        extra: what the user added.
        files: the checksum of each file in the folder.
    """

    step: int
    world_size: int
    algorithm: str
    replicas: str
    parts: list[str]
    saved_at: str
    torch: str
    extra: Any
    files: Mapping[str, Checksum]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> Manifest:
        """Raises `CheckpointError` if `text`, found at `path`, is no manifest that this version reads."""
        try:
            fields = json.loads(text)
            found = fields.pop("format")
            if found != FORMAT:
                raise CheckpointError(
                    f"{path} has format {found}, and this version of murmura reads format {FORMAT}. Read it with the "
                    "version that wrote it"
                )
            files = {name: Checksum(**each) for name, each in fields.pop("files").items()}
            return cls(files=files, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error


def folder_name(step: int) -> str:
    return f"step-{step:09}"


def partial(path: Path) -> Path:
    """Return the name of the folder `path` while it is being written or removed."""
    return path.with_name(f".{path.name}.partial")


def algorithm_name(algorithm: AlgorithmImpl) -> str:
    return type(algorithm).__name__.removesuffix("Impl")


def steps_in(folder: Path) -> list[int]:
    """Return, in order, the steps of the complete checkpoints in `folder`."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted(int(match[1]) for match, path in matches if match and (path / FILE).is_file())
