"""Process groups of Gloo that leave torch's default group untouched: for torch's DDP, and as a peer to measure."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from murmura import Transport

LOOPBACK = "127.0.0.1"  # for ranks of one host, so that no port is opened to the network


def gloo_backend(transport: Transport, store_file: Path, **place: str) -> Any:
    """Return a bare Gloo process group on ``hostname=`` or ``interface=`` (default: loopback); every rank calls it."""
    c10d: Any = torch.distributed  # its stubs lack options and manually built groups
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(**(place or {"hostname": LOOPBACK}))]
    options._timeout = timedelta(seconds=transport.timeout)
    store = c10d.FileStore(str(store_file), transport.world_size)
    return c10d.ProcessGroupGloo(store, transport.rank, transport.world_size, options)


def gloo_group(transport: Transport, store_file: Path, **place: str) -> Any:
    """Return a Gloo process group that torch's DDP accepts."""
    c10d: Any = torch.distributed
    gloo = gloo_backend(transport, store_file, **place)
    store = c10d.FileStore(f"{store_file}-group", transport.world_size)
    group = c10d.ProcessGroup(store, transport.rank, transport.world_size)
    group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(c10d.ProcessGroup.BackendType.GLOO)
    return group
