"""Process groups of Gloo and NCCL beside torch's default group: for torch's DDP, and as peers to measure."""

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


def nccl_backend(transport: Transport, store_file: Path) -> Any:
    """Return a bare NCCL process group on this process's GPU; every rank calls it."""
    c10d: Any = torch.distributed
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=transport.timeout)
    store = c10d.FileStore(str(store_file), transport.world_size)
    nccl = c10d.ProcessGroupNCCL(store, transport.rank, transport.world_size, options)
    nccl.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return nccl


def nccl_group(transport: Transport, store_file: Path) -> Any:
    """Return an NCCL process group that torch's DDP accepts."""
    c10d: Any = torch.distributed
    nccl = nccl_backend(transport, store_file)
    store = c10d.FileStore(f"{store_file}-group", transport.world_size)
    group = c10d.ProcessGroup(store, transport.rank, transport.world_size)
    group._register_backend(torch.device("cuda"), c10d.ProcessGroup.BackendType.NCCL, nccl)
    group._set_default_backend(c10d.ProcessGroup.BackendType.NCCL)
    return group
