"""Starting the ranks of a benchmark with MPICH's mpiexec; see `murmura.tools.ranks` for what is in the folder."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from murmura.errors import ConfigError, MurmuraError
from murmura.tools import ranks
from murmura.tools.progress import PROGRESS

STALL_SECONDS = 300.0  # without any progress: longer than the slowest step of a measurement
OUTPUT_LINES = 12


def find_mpiexec() -> str:
    """The mpiexec beside this Python, or on the PATH; a ConfigError if it or mpi4py is missing."""
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("mpiexec")
    has_mpi4py = importlib.util.find_spec("mpi4py") is not None
    if has_mpi4py and found is not None:
        return found
    missing = [*([] if has_mpi4py else ["mpi4py"]), *([] if found else ["mpiexec"])]
    raise ConfigError(
        f"--against mpich needs {' and '.join(missing)}, which this Python does not have. "
        "Install it: pip install 'murmura[mpi]'."
    )


def run_under_mpiexec(folder: Path, num_ranks: int, fn: Callable[..., Any], *args: Any) -> Any:
    """What ``fn(transport, *args)`` returns on rank 0 of ranks started by mpiexec, which are gone afterwards.

    They tell their progress in the file `progress` of `folder`.
    """
    command = [find_mpiexec(), "-n", str(num_ranks), "-genv", "MURMURA_JOB_ID", uuid.uuid4().hex]
    command += ["-genv", "MURMURA_TIMEOUT", str(ranks.WAIT_SECONDS), *ranks.command(folder, fn, *args)]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            _await(process, folder / PROGRESS)
        finally:
            _end(process)
    if process.returncode == 0 and (folder / ranks.RESULT).exists():
        return ranks.result(folder)
    raise MurmuraError(cause(folder, process.returncode))


def _await(process: subprocess.Popen[bytes], progress: Path) -> None:
    """Wait for the end of mpiexec as long as there is progress."""
    seen, last = -1, time.monotonic()
    while True:
        try:
            process.wait(timeout=0.5)
            return
        except subprocess.TimeoutExpired:
            written = progress.stat().st_size if progress.exists() else 0
            if written != seen:
                seen, last = written, time.monotonic()
            if time.monotonic() - last > STALL_SECONDS:
                raise MurmuraError(
                    f"the ranks under mpiexec made no progress for {STALL_SECONDS:.0f} s and were ended. "
                    "Try fewer ranks, or smaller sizes."
                ) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    for end in (process.terminate, process.kill):  # asked, mpiexec ends its ranks too
        if process.poll() is None:
            end()
            try:
                process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                continue


def cause(folder: Path, status: int) -> str:
    """Why there is no result: the first error of a rank, else the last output of mpiexec."""
    if error := ranks.first_error(folder):
        return error
    lines = (folder / "output").read_text(encoding="utf-8", errors="replace").split("\n")
    printed = "\n".join(line for line in lines if line.strip()).splitlines()[-OUTPUT_LINES:]
    return "\n".join([f"mpiexec ended with status {status} and no result. Its last output:", *printed])
