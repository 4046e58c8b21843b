"""Read the limits of this process's control groups, which containers, SLURM and systemd set.

Both versions of control groups are read. A limit of any group above counts too, and the tightest one is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

UNLIMITED_BYTES = 2**60  # version 1 writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class Limits:
    """The limits; None is no limit. `cpus` is processor time: 1.5 is the time of one and a half cores."""

    cpus: float | None = None
    memory_bytes: int | None = None


def read_limits(proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> Limits:
    """Return the limits of this process; those that cannot be read count as no limit."""
    unified = mount if (mount / "cgroup.controllers").exists() else mount / "unified"
    cpus: list[float] = []
    memories: list[int] = []
    for controllers, path in _memberships(proc / "self" / "cgroup"):
        if not controllers:
            cpus += _along(unified, path, _cpus_v2)
            memories += _along(unified, path, lambda folder: _memory(folder / "memory.max"))
        if "cpu" in controllers:
            cpus += _along(mount / "cpu", path, _cpus_v1)
        if "memory" in controllers:
            memories += _along(mount / "memory", path, lambda folder: _memory(folder / "memory.limit_in_bytes"))
    return Limits(min(cpus, default=None), min(memories, default=None))


def _memberships(file: Path) -> Iterator[tuple[list[str], str]]:
    """Controllers (none for version 2) and path of each group this process is in: "4:cpu,cpuacct:/some/group"."""
    for line in _text(file).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield [name for name in controllers.split(",") if name], path


def _along(root: Path, path: str, read: Callable[[Path], T | None]) -> list[T]:
    """Return what `read` finds in a group and in its parents.

    Inside a container the path may be the host's and lead nowhere; then what is mounted at the root is our group.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return [value for folder in folders if (value := read(folder)) is not None]


def _cpus_v2(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split()  # "150000 100000" or "max 100000"
    return _share(words[0], words[1]) if len(words) == 2 else None


def _cpus_v1(folder: Path) -> float | None:
    return _share(_text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip())


def _share(quota: str, period: str) -> float | None:
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:  # neither "max" nor "-1"
        return int(quota) / int(period)
    return None


def _memory(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdecimal() and int(text) < UNLIMITED_BYTES else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
