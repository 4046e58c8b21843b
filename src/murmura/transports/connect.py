"""connect(): from a config, or the environment a launcher left, to the transport that fits."""

from __future__ import annotations

import torch

from murmura.config import DistributedConfig
from murmura.errors import ConfigError
from murmura.transports.base import Transport
from murmura.transports.hierarchical import HierarchicalTransport
from murmura.transports.in_process import InProcessTransport
from murmura.transports.process_group import ProcessGroupTransport
from murmura.transports.rendezvous import open_store, sign_in, under
from murmura.transports.shared_memory import SharedMemoryTransport
from murmura.transports.signed_store import SignedStore
from murmura.types import DistributedBackend, TransportKind

__all__ = ["connect"]

_LOOPBACK = ("", "localhost", "127.0.0.1", "::1")


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
    job = f"{config.job_id}:{config.coordinator_addr}:{config.secret}"
    return SharedMemoryTransport.join(job, config.rank, config.world_size, timeout=config.timeout)


def _join_over_a_network(config: DistributedConfig, kind: TransportKind) -> Transport:
    if not config.coordinator_addr:
        raise ConfigError(f"transport='{kind}' needs coordinator_addr, the host:port where rank 0 can be reached.")
    rank, size = config.rank, config.world_size
    store = open_store(config.coordinator_host, config.coordinator_port, rank, size, config.timeout)
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
        return HierarchicalTransport.join(job, rank, size, backend=between, timeout=config.timeout)
    return ProcessGroupTransport.join(job, rank, size, backend=kind, timeout=config.timeout)


def choose(config: DistributedConfig) -> TransportKind:
    """What transport="auto" stands for, as far as one rank can tell."""
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
    return config.coordinator_addr == "" or config.coordinator_host in _LOOPBACK
