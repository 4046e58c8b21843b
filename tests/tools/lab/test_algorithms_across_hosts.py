"""Every algorithm between simulated hosts, against its simulation, to 1e-9 in float64.

That holds for the quantised ones too: the simulation rounds as they do.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from contracts.catalogue import CATALOGUE
from contracts.training import Run, assert_close, by_step, regression, spread
from murmura import TransportKind
from murmura.tools.lab import Hosts
from oracles.algorithms.simulation import simulate
from tools.lab.conditions import needs_namespaces
from tools.lab.every_algorithm import STEPS
from worlds import SECONDS

TESTS = Path(__file__).parents[2]


@needs_namespaces
@pytest.mark.timeout(120)  # processes that import torch, beside whatever else the machine does
@pytest.mark.parametrize(
    ("num_hosts", "ranks_per_host", "transport", "used"),
    [
        pytest.param(2, 2, TransportKind.GLOO, "ProcessGroupTransport", id="2x2-gloo", marks=pytest.mark.slow),
        pytest.param(4, 1, TransportKind.AUTO, "ProcessGroupTransport", id="4x1", marks=pytest.mark.slow),
        pytest.param(3, 1, TransportKind.AUTO, "ProcessGroupTransport", id="3x1", marks=pytest.mark.slow),
        pytest.param(2, 2, TransportKind.AUTO, "HierarchicalTransport", id="2x2", marks=pytest.mark.slow),
    ],
)
def test_every_algorithm_does_across_hosts_what_it_should(
    tmp_path: Path, num_hosts: int, ranks_per_host: int, transport: TransportKind, used: str
) -> None:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "MURMURA_TRANSPORT": transport, "MURMURA_TIMEOUT": str(SECONDS)}
    with Hosts(num_hosts) as hosts:
        program = [sys.executable, "-m", "tools.lab.every_algorithm", str(tmp_path)]
        hosts.run(program, ranks_per_host=ranks_per_host, env=variables, capture=True, timeout=100)
    size = num_hosts * ranks_per_host
    seen = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(size)]
    places = [rank // ranks_per_host for rank in range(size)]
    assert [(each["hosts"], each["transport"]) for each in seen] == [(places, used)] * size
    by_rank = [[Run(flats, layouts) for flats, layouts in each["runs"]] for each in seen]
    for entry, runs in zip(CATALOGUE, zip(*by_rank, strict=True), strict=True):
        wanted = simulate(entry.rule(runs), entry.fit(regression("momentum")), size, STEPS, places)
        assert_close(by_step(runs), wanted)
        assert all(spread(flats) == 0 for flats in by_step(runs)) == entry.lockstep
