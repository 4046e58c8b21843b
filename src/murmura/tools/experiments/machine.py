"""Machine describes where something was measured, for reports and runs."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from murmura import __version__
from murmura.launch.plan import num_cores


@dataclass(frozen=True)
class Machine:
    """Where it was measured, and with which versions; `cores` are those that this process may use."""

    cpu: str
    cores: int
    system: str
    python: str
    torch: str
    murmura: str

    @classmethod
    def here(cls) -> Machine:
        return cls(
            cpu=_cpu_model(),
            cores=num_cores(),
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            torch=torch.__version__,
            murmura=__version__,
        )


def available_bytes(proc: Path = Path("/proc")) -> int | None:
    """Return the memory available without swapping; None if unknown."""
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def physical_bytes() -> int | None:
    """Return the memory of the machine; None if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a POSIX system, or one that does not say
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown")
