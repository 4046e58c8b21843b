"""Starting the ranks of a benchmark with MPICH's mpiexec, and hearing from them through a folder.

In the folder: `order.json` (what to measure), `progress`, `result.json` (rank 0's), `error-PID.json` (of a rank that
failed) and `output` (what mpiexec and the ranks printed).
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from murmura.benchmarks.measure import Measurement, Sample
from murmura.benchmarks.spec import AllReduceSpec, Peer
from murmura.errors import ConfigError, MurmuraError

STALL_SECONDS = 300.0  # without any progress: longer than the slowest step of a measurement
OUTPUT_LINES = 12


def find_mpiexec() -> str:
    """The mpiexec beside this Python, or on the PATH; a ConfigError if it or mpi4py is missing."""
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("mpiexec")
    missing = [
        name
        for name, there in (("mpi4py", importlib.util.find_spec("mpi4py") is not None), ("mpiexec", found is not None))
        if not there
    ]
    if missing or found is None:
        raise ConfigError(
            f"--against mpich needs {' and '.join(missing)}, which this Python does not have. "
            "Install it: pip install 'murmura[mpi]'."
        )
    return found


def run_under_mpiexec(spec: AllReduceSpec, folder: Path, wait_seconds: float) -> Measurement:
    """Measure `spec` on ranks started by mpiexec, where no wait of murmura's lasts longer than `wait_seconds`.

    The ranks are gone when this returns or raises.
    """
    command = [find_mpiexec(), "-n", str(spec.ranks)]
    command += ["-genv", "MURMURA_JOB_ID", uuid.uuid4().hex, "-genv", "MURMURA_TIMEOUT", str(wait_seconds)]
    command += [sys.executable, "-m", "murmura.benchmarks.mpi_rank", str(folder)]
    (folder / "order.json").write_text(json.dumps(asdict(spec)), encoding="utf-8")
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            _await(process, folder / "progress")
        finally:
            _end(process)
    if (folder / "result.json").exists() and process.returncode == 0:
        return read_measurement(folder)
    raise MurmuraError(_story(folder, process.returncode))


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


def _story(folder: Path, status: int) -> str:
    """Why there is no result: the first error of a rank, else the last words of mpiexec."""
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("error-*.json")]
    if errors:
        # A rank that failed by itself explains those that then missed it.
        first = min(errors, key=lambda error: (error["waited_in_vain"], error["time"]))
        return str(first["message"])
    lines = (folder / "output").read_text(encoding="utf-8", errors="replace").split("\n")
    printed = "\n".join(line for line in lines if line.strip()).splitlines()[-OUTPUT_LINES:]
    return "\n".join([f"mpiexec ended with status {status} and no result. Its last words:", *printed])


# Files between the two sides


def read_spec(folder: Path) -> AllReduceSpec:
    order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    peers = tuple(Peer(peer) for peer in order["peers"])
    return AllReduceSpec(
        ranks=order["ranks"], sizes_bytes=tuple(order["sizes_bytes"]), peers=peers, seconds=order["seconds"]
    )


def write_measurement(folder: Path, measurement: Measurement) -> None:
    (folder / "result.json").write_text(json.dumps(asdict(measurement)), encoding="utf-8")


def read_measurement(folder: Path) -> Measurement:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    samples = (Sample(**{**sample, "seconds": tuple(sample["seconds"])}) for sample in found["samples"])
    return Measurement(found["about"], tuple(samples))


def write_error(folder: Path, pid: int, message: str, *, waited_in_vain: bool) -> None:
    told = {"message": message, "waited_in_vain": waited_in_vain, "time": time.time()}
    (folder / f"error-{pid}.json").write_text(json.dumps(told), encoding="utf-8")
