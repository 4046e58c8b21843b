"""Hosts that really are different ones to the transport: it is chosen, and a death on one is known on the other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from murmura import PeerLost
from murmura.tools.lab import Hosts
from tools.lab.conditions import needs_namespaces

pytestmark = needs_namespaces

AVERAGE = """
import murmura, torch
with murmura.connect() as transport:
    mean = transport.all_reduce(torch.full((3_000_001,), transport.rank + 1.0), "mean")
    print(type(transport).__name__, *transport.hosts, *mean.unique().tolist())
"""
DIE = """
import json, os, pathlib, signal, sys, time
import murmura, torch
folder, culprit = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with murmura.connect() as transport:
    tensor = torch.ones(1000)
    transport.all_reduce(tensor)
    if transport.rank == culprit:
        (folder / "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        transport.all_reduce(tensor)
    except murmura.PeerLost as error:
        told = {"peer": error.peer, "after": time.monotonic() - float((folder / "died").read_text())}
        (folder / str(transport.rank)).write_text(json.dumps(told))
"""


@pytest.mark.parametrize(
    ("ranks_per_host", "told"),
    [
        pytest.param(2, "HierarchicalTransport 0 0 1 1 2.5", marks=pytest.mark.slow),  # a script trains on it, as well
        (1, "ProcessGroupTransport 0 1 1.5"),
    ],
)
def test_connect_chooses_by_hosts(ranks_per_host: int, told: str) -> None:
    with Hosts(2) as hosts:
        lines = hosts.run([sys.executable, "-c", AVERAGE], ranks_per_host=ranks_per_host, capture=True, timeout=60)
    assert [line.strip() for line in lines] == [told] * (2 * ranks_per_host)


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [2, 3])
def test_a_death_is_known_on_the_other_host(culprit: int, tmp_path: Path) -> None:
    """Of a leader, and of a rank that has no connection between hosts."""
    with Hosts(2) as hosts, pytest.raises(PeerLost, match=f"rank {culprit} on host 1"):
        hosts.run([sys.executable, "-c", DIE, str(tmp_path), str(culprit)], ranks_per_host=2, capture=True, timeout=60)
    others = [rank for rank in range(4) if rank != culprit]
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in others]
    assert [each["peer"] for each in told] == [culprit] * 3
    assert max(each["after"] for each in told) < 5.0
