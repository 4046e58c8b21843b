"""Every algorithm between processes, against its simulation; one world for all, since worlds take long to start."""

from __future__ import annotations

import pytest
import torch

from contracts.catalogue import EVERYTHING
from contracts.training import Run, assert_close, by_step, regression, spread, train
from murmura import Transport, run_world
from oracles.algorithms.simulation import simulate
from worlds import SECONDS

STEPS = 6


def train_all(transport: Transport) -> list[Run]:
    torch.set_num_threads(1)
    return [train(transport, entry.make(), entry.fit(regression("momentum")), STEPS) for entry in EVERYTHING]


WORLDS = {  # the transport, and on which hosts the ranks are
    "hosts": ("shared_memory", [0, 1, 1, 0]),
    "one host": ("shared_memory", [0, 0, 0]),
    "gloo": ("gloo", [0, 0, 0]),
    "five on gloo": ("gloo", [0, 0, 0, 0, 0]),
    "hierarchical": ("hierarchical", [0, 1, 1, 0]),
}


@pytest.mark.parametrize("world", [pytest.param(each, marks=[pytest.mark.slow] * (each != "hosts")) for each in WORLDS])
def test_every_algorithm_between_processes(world: str) -> None:
    transport, hosts = WORLDS[world]
    by_rank = run_world(train_all, len(hosts), kind="processes", transport=transport, hosts=hosts, timeout=SECONDS)
    for entry, runs in zip(EVERYTHING, zip(*by_rank, strict=True), strict=True):
        wanted = simulate(entry.rule(runs), entry.fit(regression("momentum")), len(hosts), STEPS, hosts)
        assert_close(by_step(runs), wanted)
        assert not entry.lockstep or all(spread(flats) == 0 for flats in by_step(runs))
