"""Machine describes where something was measured, for reports and runs."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from murmura import __version__
from murmura.transports.host import num_cores


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


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown")
