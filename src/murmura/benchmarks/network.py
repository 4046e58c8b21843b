"""The benchmark on slow links: steps and bytes of every algorithm on simulated hosts, beside torch's DDP.

`run_network` makes the hosts and starts a rank on each; `network_measure` is what the ranks do, `network_contestants`
who competes. They hear from each other through a folder: `order.json` (what to measure), `progress`, whose first line
for a rate asks for it, `shaped-I` (the links have rate I), `torch` (where torch's group meets) and `result.json`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from murmura.benchmarks.ddp_report import now
from murmura.benchmarks.network_contestants import contestant_names, formula_bytes, period
from murmura.benchmarks.network_measure import MIN_ROUNDS, Sample
from murmura.benchmarks.network_report import NetworkReport, rows_at
from murmura.benchmarks.network_spec import NetworkSpec
from murmura.benchmarks.progress import Progress, silent, watching
from murmura.benchmarks.report import Machine
from murmura.lab import Hosts
from murmura.transports.decorators.throttled import parse_rate

START_SECONDS = 300.0  # to start, wrap and warm up, also on a busy machine
SLACK = 4.0  # how much longer than the formula says anything may take


def run_network(spec: NetworkSpec, on_progress: Callable[[Progress], None] = silent) -> NetworkReport:
    """Measure `spec` on hosts of its own, which needs root. `on_progress` is called from a thread.

    Raises a `MurmuraError` if hosts cannot be made, a rank fails, or replicas drift apart that should not.
    """
    load_before, *_ = os.getloadavg()
    shapes = [tuple(parameter.shape) for parameter in spec.model.build().parameters()]
    with tempfile.TemporaryDirectory(prefix="murmura-bench-") as name, Hosts(spec.hosts) as hosts:
        folder = Path(name)
        (folder / "order.json").write_text(json.dumps(asdict(spec)), encoding="utf-8")

        def told(progress: Progress) -> None:
            shaped = folder / f"shaped-{progress.index}"
            if not shaped.exists():
                hosts.shape(spec.rates[progress.index])
                shaped.touch()
            on_progress(progress)

        wait_seconds, total_seconds = deadlines(spec, shapes)
        with watching(folder / "progress", told):
            hosts.run(
                [sys.executable, "-m", "murmura.benchmarks.network_rank", str(folder)],
                env={"MURMURA_TIMEOUT": f"{wait_seconds:.0f}"},
                capture=True,
                timeout=total_seconds,
            )
        found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    rows = [
        row
        for rate, samples in zip(spec.rates, found["samples"], strict=True)
        for row in rows_at(rate, [Sample(**sample) for sample in samples], shapes)
    ]
    return NetworkReport(spec, now(), Machine.here(), load_before, found["about"], tuple(rows))


def deadlines(spec: NetworkSpec, shapes: list[tuple[int, ...]]) -> tuple[float, float]:
    """Seconds that one wait of a rank, and the whole measurement, may take at most."""
    slowest = min(parse_rate(rate) for rate in spec.rates)
    periods = [period(name) * formula_bytes(name, shapes, spec.hosts) / slowest for name in contestant_names(spec)]
    rounds = len(spec.rates) * (spec.seconds + (MIN_ROUNDS + 1) * SLACK * sum(periods))
    return START_SECONDS / 2 + SLACK * max(periods), START_SECONDS + SLACK * rounds
