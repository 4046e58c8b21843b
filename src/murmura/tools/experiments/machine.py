"""The machine that something was measured on, as every report and run names it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from murmura import __version__


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
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            python=platform.python_version(),
            torch=torch.__version__,
            murmura=__version__,
        )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown")
