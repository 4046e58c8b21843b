"""The all-reduce benchmark: murmura and its peers on one set of rank processes, in one run.

`run_all_reduce` starts the ranks and returns a `Report`; `measure` is what the ranks do, `contestants` who competes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from murmura import MurmuraError, run_world
from murmura.benchmarks.measure import Measurement, measure_as_rank
from murmura.benchmarks.mpiexec import find_mpiexec, run_under_mpiexec
from murmura.benchmarks.progress import Progress, silent, watching
from murmura.benchmarks.report import Report
from murmura.benchmarks.spec import AllReduceSpec, Peer, check_memory

WAIT_SECONDS = 120.0  # the deadline of each wait of a rank for another


def run_all_reduce(spec: AllReduceSpec, on_progress: Callable[[Progress], None] = silent) -> Report:
    """Measure `spec`. `on_progress` is called from a thread, a few times a second.

    Raises a ConfigError before anything is started if this machine cannot do it, another `MurmuraError` if the
    measurement fails or a contestant sums wrongly.
    """
    check_memory(spec)
    if Peer.MPICH in spec.peers:
        find_mpiexec()
    with tempfile.TemporaryDirectory(prefix="murmura-bench-") as name:
        folder = Path(name)
        with watching(folder / "progress", on_progress):
            return Report.of(spec, _measure(spec, folder))


def _measure(spec: AllReduceSpec, folder: Path) -> Measurement:
    if Peer.MPICH in spec.peers:
        return run_under_mpiexec(spec, folder, WAIT_SECONDS)
    try:
        told = run_world(measure_as_rank, spec.ranks, spec, folder, kind="processes", timeout=WAIT_SECONDS)
    except MurmuraError:
        raise
    except (RuntimeError, OSError) as error:  # a peer's own error
        raise MurmuraError(f"the measurement failed: {error}") from error
    measurement: Measurement = told[0]
    return measurement
