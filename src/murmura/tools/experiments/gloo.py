"""Process groups of Gloo that leave torch's default group untouched: for torch's DDP, and as a peer to measure."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from murmura import Transport

LOOPBACK = "127.0.0.1"  # for ranks of one host, so that no port is opened to the network


def gloo_backend(transport: Transport, meeting_file: Path, **place: str) -> Any:
    """Gloo alone, on ``hostname=`` or ``interface=`` (loopback by default); every rank calls it."""
    c10d: Any = torch.distributed  # its stubs know nothing of options and of groups that are built by hand
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(**(place or {"hostname": LOOPBACK}))]
    options._timeout = timedelta(seconds=transport.timeout)
    store = c10d.FileStore(str(meeting_file), transport.world_size)
    return c10d.ProcessGroupGloo(store, transport.rank, transport.world_size, options)


def gloo_group(transport: Transport, meeting_file: Path, **place: str) -> Any:
    """The same as a process group that torch's DDP accepts."""
    c10d: Any = torch.distributed
    gloo = gloo_backend(transport, meeting_file, **place)
    store = c10d.FileStore(f"{meeting_file}-group", transport.world_size)
    group = c10d.ProcessGroup(store, transport.rank, transport.world_size)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    return group
