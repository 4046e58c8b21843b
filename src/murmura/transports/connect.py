"""connect(): from a config, or the environment a launcher left, to the transport that fits."""

from __future__ import annotations

import time
import weakref

import torch

from murmura.config import DistributedConfig
from murmura.errors import ConfigError
from murmura.transports.base import Transport
from murmura.transports.hierarchical import HierarchicalTransport
from murmura.transports.in_process import InProcessTransport
from murmura.transports.process_group import ProcessGroupTransport
from murmura.transports.rendezvous import LOOPBACK, Store, StoreLost, answers, reach_store, serve_store, sign_in, under
from murmura.transports.shared_memory import SharedMemoryTransport
from murmura.transports.signed_store import SignedStore
from murmura.transports.watched_store import nobody, poll
from murmura.types import DistributedBackend, TransportKind

__all__ = ["connect"]

_SERVED: weakref.WeakValueDictionary[tuple[str, int], Store] = weakref.WeakValueDictionary()
"""The stores that this process serves as rank 0, as long as a transport lives that needs them; the next joins in."""


def connect(config: DistributedConfig | None = None) -> Transport:
    """The transport of this rank, once all ranks have met; by default as the environment says.

    A world of one needs nothing. Several processes on one host share memory and open no port; with backend="cuda" and
    a GPU for each they take NCCL, which knows the way between those. Ranks on several hosts meet at `coordinator_addr`
    and talk through a process group: NCCL where they compute on CUDA, else Gloo, which joins only the hosts where some
    have several ranks: these share memory.
    """
    config = DistributedConfig.from_env() if config is None else config
    kind = choose(config) if config.transport is TransportKind.AUTO else config.transport
    if kind is TransportKind.IN_PROCESS:
        if config.world_size > 1:
            raise ConfigError(
                f"transport='in_process' joins the threads of one process, but this is rank {config.rank} of "
                f"{config.world_size} processes. Use run_world(fn, {config.world_size}) or "
                "InProcessTransport.create_group for threads, or transport='shared_memory' for processes."
            )
        return InProcessTransport.create_group(1, timeout=config.timeout)[0]
    if kind in (TransportKind.GLOO, TransportKind.NCCL, TransportKind.HIERARCHICAL):
        return _join_over_a_network(config, kind)
    if not _on_one_host(config):
        raise ConfigError(
            f"transport='shared_memory' joins the processes of one host, but only {config.local_world_size} of the "
            f"{config.world_size} ranks are on this one."
        )
    job = f"{config.job_id}:{config.coordinator_addr}"
    return SharedMemoryTransport.join(
        job, config.rank, config.world_size, timeout=config.timeout, secret=config.secret or ""
    )


def _join_over_a_network(config: DistributedConfig, kind: TransportKind) -> Transport:
    if not config.coordinator_addr:
        raise ConfigError(f"transport='{kind}' needs coordinator_addr, the host:port where rank 0 can be reached.")
    deadline = time.monotonic() + config.timeout
    while True:
        store = _open_store(config, max(1.0, deadline - time.monotonic()))
        try:
            transport = _join(store, config, kind)
        except StoreLost:
            # Perhaps the store of an earlier connection, which rank 0 has closed to open the next.
            if config.rank == 0 or time.monotonic() > deadline or not _is_back(config, deadline):
                raise
        else:
            transport._store_served = store
            return transport


def _open_store(config: DistributedConfig, timeout: float) -> Store:
    host, port = config.coordinator_host, config.coordinator_port
    if config.rank == 0:
        served = _SERVED.get((host, port)) or serve_store(host, port, config.world_size, timeout)
        if served is not None:
            _SERVED[host, port] = served
            return served
    return reach_store(host, port, config.rank, timeout)  # on rank 0 a launcher's


def _is_back(config: DistributedConfig, deadline: float) -> bool:
    """Whether somebody serves the store again before the deadline."""
    return poll(lambda: answers(config.coordinator_host, config.coordinator_port), deadline - time.monotonic(), nobody)


def _join(store: Store, config: DistributedConfig, kind: TransportKind) -> Transport:
    rank, size = config.rank, config.world_size
    scope = f"murmura/{config.job_id or ''}"
    job = under(store, scope)
    if config.secret:
        job = SignedStore(job, config.secret, scope)
    if config.transport is TransportKind.AUTO and kind is TransportKind.GLOO:
        # A rank knows how many share its own host, not the others'; all must come to the same choice.
        hosts = sign_in(under(job, "hosts"), rank, size, config.timeout).hosts
        kind = TransportKind.HIERARCHICAL if 1 < len(set(hosts)) < size else kind
    if kind is TransportKind.HIERARCHICAL:
        between = TransportKind.NCCL if config.backend is DistributedBackend.CUDA else TransportKind.GLOO
        return HierarchicalTransport.join(job, rank, size, kind=between, timeout=config.timeout)
    return ProcessGroupTransport.join(job, rank, size, kind=kind, timeout=config.timeout)


def choose(config: DistributedConfig) -> TransportKind:
    """The transport that "auto" selects, as far as one rank can tell."""
    if config.world_size == 1:
        return TransportKind.IN_PROCESS
    if _on_one_host(config):
        return TransportKind.NCCL if _has_a_gpu_each(config) else TransportKind.SHARED_MEMORY
    return TransportKind.NCCL if config.backend is DistributedBackend.CUDA else TransportKind.GLOO


def _has_a_gpu_each(config: DistributedConfig) -> bool:
    wants_cuda = config.backend is DistributedBackend.CUDA and config.coordinator_addr != ""
    return wants_cuda and config.world_size <= torch.cuda.device_count()


def _on_one_host(config: DistributedConfig) -> bool:
    if config.local_world_size is not None:
        return config.local_world_size == config.world_size
    return config.coordinator_addr == "" or config.coordinator_host in LOOPBACK
