"""On one host a group opens no port: whatever listens is torch's own store."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from c10d.groups import run

LISTENING = "0A"  # as the kernel writes the state of a socket


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    own = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
    rows = [row.split() for table in ("tcp", "tcp6") for row in _rows(Path("/proc/self/net", table))]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == LISTENING and f"socket:[{row[9]}]" in own}


def _rows(table: Path) -> list[str]:
    return table.read_text().splitlines()[1:] if table.exists() else []


def use_groups() -> list[set[int]]:
    """The ports while groups on a file live, and while one on a store of torch's does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    tensor = torch.ones(100_000)
    for group in (dist.group.WORLD, dist.new_group()):
        for numel in (3, tensor.numel()):
            dist.all_reduce(tensor[:numel], group=group)
        works = [dist.isend(tensor, (rank + 1) % size, group), dist.irecv(tensor.clone(), (rank - 1) % size, group)]
        for work in works:
            assert work is not None
            work.wait()
        found.append(listening_ports())
    dist.destroy_process_group()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        found.append(listening_ports() ^ {store.port})
        dist.init_process_group("murmura", store=store, rank=0, world_size=1)
        dist.all_reduce(tensor)
        found.append(listening_ports() ^ {store.port})
    else:
        dist.init_process_group("murmura", store=dist.HashStore(), rank=0, world_size=1)
    return found


def test_a_group_on_one_host_opens_no_port() -> None:
    assert run(use_groups, 2) == [[set()] * 4, [set()] * 2]


def test_a_port_would_be_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[1] in listening_ports()
    assert server.fileno() == -1
