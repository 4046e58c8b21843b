"""The torch.distributed backend on hosts that really are different ones: four ranks on two of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from c10d import programs
from c10d.groups import run
from c10d.test_programs import is_equal
from murmura import PeerLost
from murmura.tools.lab import Hosts
from tools.lab.conditions import needs_namespaces

pytestmark = needs_namespaces

TESTS = str(Path(__file__).parents[2])
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import murmura, torch
import torch.distributed as dist
from c10d import programs
torch.set_num_threads(1)
dist.init_process_group("murmura")
world = dist.group.WORLD._transport
print(type(world).__name__)
results = programs.run_all(sys.argv[3].split(","))
torch.save(results, f"{sys.argv[2]}/{dist.get_rank()}")
dist.destroy_process_group()
"""
DIE = """
import json, os, pathlib, signal, sys, time
import murmura, torch
import torch.distributed as dist
folder = pathlib.Path(sys.argv[1])
dist.init_process_group("murmura")
tensor = torch.ones(1000)
dist.all_reduce(tensor)
if dist.get_rank() == 2:
    (folder / "died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(tensor)
except murmura.PeerLost as error:
    told = {"peer": error.peer, "after": time.monotonic() - float((folder / "died").read_text())}
    (folder / str(dist.get_rank())).write_text(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_programs_on_two_hosts_give_what_gloo_gives(tmp_path: Path) -> None:
    names = list(programs.PROGRAMS)
    with Hosts(2) as hosts:
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM, TESTS, str(tmp_path), ",".join(names)]
        told = hosts.run(command, ranks_per_host=2, capture=True, timeout=300)
    assert all(each.startswith("HierarchicalTransport") for each in told)
    theirs = run(programs.run_all, 4, names, backend="gloo")
    faults: list[Any] = []
    for rank in range(4):
        ours = torch.load(tmp_path / str(rank))
        for name in names:
            one, other = ours[name], theirs[rank][name]
            if isinstance(one, str) or isinstance(other, str):
                faults.append(f"{name} on rank {rank}: {one if isinstance(one, str) else other}")
            elif not all(is_equal(*each, 4, name) for each in zip(one, other, strict=True)):
                faults.append(f"{name} on rank {rank}: {one} is not {other}"[:500])
    assert not faults, "\n".join(faults)


@pytest.mark.slow
def test_a_death_is_known_on_the_other_host(tmp_path: Path) -> None:
    with Hosts(2) as hosts, pytest.raises(PeerLost, match="rank 2 on host 1"):
        hosts.run([sys.executable, "-c", DIE, str(tmp_path)], ranks_per_host=2, capture=True, timeout=60)
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1, 3)]
    assert [each["peer"] for each in told] == [2] * 3
    assert max(each["after"] for each in told) < 5.0
