"""What other systems lack is missed only by what needs it."""

from __future__ import annotations

import os

import pytest

from murmura import Transport, run_world
from murmura.transports.host import num_cores


def rank_of(transport: Transport) -> int:
    return transport.rank


def test_processes_start_where_the_affinity_of_a_process_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert run_world(rank_of, 2, kind="processes", transport="gloo") == [0, 1]


def test_the_cores_of_the_machine_count_where_the_affinity_of_a_process_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    for told, expected in ((6, 6), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda told=told: told)
        assert num_cores() == expected
