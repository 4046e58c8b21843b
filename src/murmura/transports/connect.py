"""connect(): from a config, a process group, or the environment a launcher left, to the transport that fits.

The ranks sign in: on one host at a Unix socket, which opens no port; for a process group, or on several hosts, in a
store. There each says where its tensors are and what it was told to take. All then make the same choice, or raise the
same error, and join that transport. Ranks of one host that went to the one and the other find out by an `Announcement`.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from murmura.config import DistributedConfig
from murmura.environment import local_rank_from_env, seconds, setting_from_env
from murmura.errors import ConfigError
from murmura.transports import devices
from murmura.transports.announcement import Announcement
from murmura.transports.base import Transport, check_transport
from murmura.transports.checks import Check, check_timeout
from murmura.transports.choice import Choice, Claim, choose
from murmura.transports.foreign_group import FakeGroupTransport, ForeignGroupTransport
from murmura.transports.in_process import InProcessTransport
from murmura.transports.rendezvous import LOOPBACK, Store, StoreLost, answers, reach_store, serve_store
from murmura.transports.shared_memory import SharedMemoryTransport, futex
from murmura.transports.shared_memory import rendezvous as one_host
from murmura.transports.store_rendezvous import StoreRendezvous, log_choice
from murmura.transports.user_group import UserGroup, default_group, given_group
from murmura.transports.watched_store import Watch, nobody, poll
from murmura.types import DistributedBackend, TransportKind, parse

__all__ = ["connect", "transport_for"]

log = logging.getLogger("murmura")

_SERVED: weakref.WeakValueDictionary[tuple[str, int], Store] = weakref.WeakValueDictionary()
"""The stores that this process serves as rank 0, as long as a transport lives that needs them; the next joins in."""


def connect(
    config: DistributedConfig | None = None,
    *,
    device: torch.device | str | None = None,
    transport: TransportKind | str | None = None,
    timeout: float | None = None,
    check: str | None = None,
) -> Transport:
    """The transport of this rank, once all ranks have met.

    Without `config` the ranks are those of torch.distributed's default process group if there is one, else those that
    the environment tells of, else this one alone.

    Args:
        config: this rank's place in its world.
        device: where the tensors are that will be exchanged; None takes the config's backend, or MURMURA_DEVICE, or
            what the process group is for.
        transport: the kind to take, before that of the config and MURMURA_TRANSPORT. "auto" takes NCCL for CUDA if each
            rank has a GPU of its own, else shared memory on one host, and on several a `HierarchicalTransport`, or Gloo
            where each has one rank.
        timeout: seconds that any wait may last, before those of the config.
        check: "always" compares the calls of all ranks before every operation, also on process groups.
    """
    if config is not None and not isinstance(config, DistributedConfig):
        raise ConfigError(
            f"config={config!r} is no DistributedConfig. Give one, or None for what the environment says."
        )
    options = _Options.of(device, transport, timeout, check)
    group = default_group() if config is None else None
    made = _connect_by_config(config, options) if group is None else _connect_with(group, options)
    made.default_algorithm = None if config is None else config.algorithm
    return made


def transport_for(module: nn.Module, *, transport: Any = None, process_group: Any = None) -> Transport:
    """The transport on which the replicas of `module` stay together: the one given, or a connection of its own.

    The caller closes what it did not pass as `transport`. `process_group` is one of torch.distributed, which fixes the
    ranks and their order; closing the transport leaves it open.
    """
    if transport is not None and process_group is not None:
        raise ConfigError("transport= and process_group= both say who the ranks are. Pass one of them.")
    if transport is not None:
        check_transport(transport)
        return transport  # type: ignore[no-any-return]
    device = devices.device_of(module)
    if process_group is None:
        return connect(device=device)
    options = _Options.of(device, TransportKind.AUTO, None, None)  # the argument comes before MURMURA_TRANSPORT
    return _connect_with(given_group(process_group), options)


@dataclass(frozen=True)
class _Options:
    """The arguments of `connect`, checked; None where the config or the environment decides."""

    device: torch.device | None
    transport: TransportKind | None
    timeout: float | None
    check: Check

    @classmethod
    def of(cls, device: Any, transport: str | None, timeout: float | None, check: str | None) -> _Options:
        check_timeout(timeout, ConfigError)
        return cls(
            None if device is None else devices.parse_device(device),
            None if transport is None else parse(TransportKind, transport, "transport"),
            timeout,
            Check.BEST_EFFORT if check is None else parse(Check, check, "check"),
        )

    def device_or(self, device_kind: DistributedBackend) -> torch.device:
        return self.device or torch.device("cuda" if device_kind is DistributedBackend.CUDA else "cpu")

    def claim(self, told: TransportKind, source: str, device_kind: DistributedBackend, local_rank: int | None) -> Claim:
        """What this rank says of itself; `told`, by `source`, and `device_kind` serve where no argument was given."""
        kind, source = (told, source) if self.transport is None else (self.transport, "transport=")
        device = self.device_or(device_kind)
        return Claim(kind, source, device.type, devices.gpu_identity(device, local_rank), self.check)

    def gpu(self, told: TransportKind, device_kind: DistributedBackend, local_rank: int | None) -> int | None:
        """The number of the GPU that this rank uses, if it uses one: also NCCL that was `told` to take CPU tensors."""
        device = self.device_or(device_kind)
        if device.type == "cuda":
            return devices.gpu_number(device, local_rank)
        return devices.nccl_gpu(local_rank) if told is TransportKind.NCCL else None


# By a config


def _connect_by_config(config: DistributedConfig | None, options: _Options) -> Transport:
    source = "MURMURA_TRANSPORT" if config is None else "the config's transport"
    config = DistributedConfig.from_env() if config is None else config
    if options.timeout is not None:
        config = replace(config, timeout=options.timeout)
    claim = options.claim(config.transport, source, config.backend, config.local_rank)
    if not config.coordinator_addr:
        claim = replace(claim, gpu="")  # NCCL would need an address
    _refuse_early(claim.transport, config)
    if config.world_size == 1 and claim.transport in (TransportKind.AUTO, TransportKind.IN_PROCESS):
        log_choice(choose([claim], (0,)), 0, 1, "nobody: neither a launcher nor a process group tells of others")
        return InProcessTransport.create_group(1, timeout=config.timeout)[0]
    if not (_on_one_host(config) and futex.is_supported()):
        return _join_over_a_network(config, options, claim)
    job, secret = _job(config), config.secret or ""
    with Announcement(job, config.rank, config.world_size, claim) as announcement:
        if claim.transport not in (TransportKind.AUTO, TransportKind.SHARED_MEMORY):
            return _join_over_a_network(config, options, claim, watch=announcement.watch)
        texts = one_host.sign_in(
            f"{job}/sign-in",
            config.rank,
            config.world_size,
            claim.to_text(),
            config.timeout,
            secret=secret,
            watch=announcement.watch,
        )
    claims = [Claim.from_text(text, rank) for rank, text in enumerate(texts)]
    choice = choose(claims, (0,) * config.world_size)
    if choice.kind is not TransportKind.SHARED_MEMORY:
        return _join_over_a_network(config, options, claim, choice)
    log_choice(choice, config.rank, config.world_size, "on this host, as the launcher or the config says")
    return SharedMemoryTransport.join(job, config.rank, config.world_size, timeout=config.timeout, secret=secret)


def _refuse_early(kind: TransportKind, config: DistributedConfig) -> None:
    """Refuse what this rank alone knows to be impossible."""
    if kind is TransportKind.IN_PROCESS and config.world_size > 1:
        raise ConfigError(
            f"transport='in_process' joins the threads of one process, but this is rank {config.rank} of "
            f"{config.world_size} processes. Use run_world(fn, {config.world_size}) or "
            "InProcessTransport.create_group for threads, or transport='shared_memory' for processes."
        )
    if kind is TransportKind.SHARED_MEMORY and not _on_one_host(config):
        raise ConfigError(
            f"transport='shared_memory' joins the processes of one host, but only {config.local_world_size} of the "
            f"{config.world_size} ranks are on this one."
        )
    needs_address = kind in (TransportKind.GLOO, TransportKind.NCCL, TransportKind.HIERARCHICAL)
    if needs_address and not config.coordinator_addr:
        raise ConfigError(f"transport='{kind}' needs coordinator_addr, the host:port where rank 0 can be reached.")
    if kind is TransportKind.NCCL:
        devices.nccl_gpu(config.local_rank)


def _on_one_host(config: DistributedConfig) -> bool:
    if config.local_world_size is not None:
        return config.local_world_size == config.world_size
    return config.coordinator_addr == "" or config.coordinator_host in LOOPBACK


def _job(config: DistributedConfig) -> str:
    """A name that is equal on all ranks, also where one calls its own host by another name."""
    address = config.coordinator_addr
    if address and config.coordinator_host in LOOPBACK:
        address = f"127.0.0.1:{config.coordinator_port}"
    return f"{config.job_id}:{address}"


def _join_over_a_network(
    config: DistributedConfig, options: _Options, claim: Claim, choice: Choice | None = None, watch: Watch = nobody
) -> Transport:
    """Meet in the store at `coordinator_addr`; choose there, unless the ranks have chosen already."""
    deadline = time.monotonic() + config.timeout
    while True:
        store = _open_store(config, max(1.0, deadline - time.monotonic()), watch)
        rendezvous = StoreRendezvous(
            store=store,
            scope=f"murmura/{config.job_id or ''}",
            where=f"at {config.coordinator_addr}",
            rank=config.rank,
            world_size=config.world_size,
            timeout=config.timeout,
            secret=config.secret or "",
            check=options.check,
            gpu=options.gpu(claim.transport, config.backend, config.local_rank),
            watch=watch,
            between=TransportKind.NCCL if config.backend is DistributedBackend.CUDA else TransportKind.GLOO,
        )
        try:
            transport = rendezvous.choose_and_join(claim) if choice is None else rendezvous.join(choice)
        except StoreLost:
            # Perhaps the store of an earlier connection, which rank 0 has closed to open the next.
            if config.rank == 0 or time.monotonic() > deadline or not _is_back(config, deadline):
                raise
        else:
            transport.store_served = store
            return transport


def _open_store(config: DistributedConfig, timeout: float, watch: Watch) -> Store:
    host, port = config.coordinator_host, config.coordinator_port
    if config.rank == 0:
        served = _SERVED.get((host, port)) or serve_store(host, port, config.world_size, timeout)
        if served is not None:
            _SERVED[host, port] = served
            return served
    return reach_store(host, port, config.rank, timeout, watch)  # on rank 0 a launcher's


def _is_back(config: DistributedConfig, deadline: float) -> bool:
    """Whether somebody serves the store again before the deadline."""
    return poll(lambda: answers(config.coordinator_host, config.coordinator_port), deadline - time.monotonic(), nobody)


# By a process group of the user's


def _connect_with(user: UserGroup, options: _Options) -> Transport:
    """Connect the ranks of a group; the transport's listeners hear of the group's collectives, if it tells of them."""
    transport = _connect_by_group(user, options)
    if hasattr(user.group, "before_collectives"):
        user.group.before_collectives(transport.announce)
    return transport


def _connect_by_group(user: UserGroup, options: _Options) -> Transport:
    given = setting_from_env("timeout")
    timeout = options.timeout or (seconds(given) if given else user.timeout()) or 600.0
    told = parse(TransportKind, setting_from_env("transport") or "auto", "MURMURA_TRANSPORT")
    device_kind = parse(DistributedBackend, setting_from_env("device") or "auto", "MURMURA_DEVICE")
    if device_kind is DistributedBackend.AUTO and user.is_for_gpus_alone():
        device_kind = DistributedBackend.CUDA
    local_rank = local_rank_from_env()
    claim = options.claim(told, "MURMURA_TRANSPORT", device_kind, local_rank)
    is_auto = claim.transport is TransportKind.AUTO
    if user.world_size == 1 and (is_auto or claim.transport is TransportKind.IN_PROCESS):
        log_choice(choose([claim], (0,)), 0, 1, f"nobody: {user.words} has no other rank")
        return InProcessTransport.create_group(1, timeout=timeout)[0]
    if claim.transport is TransportKind.IN_PROCESS:
        raise ConfigError(
            f"transport='in_process' joins the threads of one process, but this is rank {user.rank} of "
            f"{user.world_size} in {user.words}. Unset MURMURA_TRANSPORT, or use 'shared_memory'."
        )
    name, store = user.backend_name(claim.device), user.store
    if is_auto and (store is None or name not in ("gloo", "nccl", "murmura", "")):
        kind: type[ForeignGroupTransport] = FakeGroupTransport if name == "fake" else ForeignGroupTransport
        log.info("rank %d of %d runs on %s, as its backend is %r.", user.rank, user.world_size, user.words, name)
        return kind(user, options.device_or(device_kind), check=options.check, timeout=timeout)
    if store is None:
        raise ConfigError(
            f"{user.words} ({name}) has no store, so its ranks cannot meet for transport='{claim.transport}'. Leave "
            "the transport out to run on the group itself."
        )
    return StoreRendezvous(
        store=store,
        scope="murmura/connect",
        where=f"through the store of {user.words}",
        rank=user.rank,
        world_size=user.world_size,
        timeout=timeout,
        secret=setting_from_env("secret") or "",
        check=options.check,
        gpu=options.gpu(claim.transport, device_kind, local_rank),
        group=user,
    ).choose_and_join(claim)
