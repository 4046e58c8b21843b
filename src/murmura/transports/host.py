"""Which host a process is on, which ranks share one, and its cores."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import torch


def host_identity() -> str:
    """The same for processes that share a kernel and a network namespace: two namespaces are two hosts."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return platform.node()


def pid_namespace() -> str:
    """The same for processes that know each other by the same numbers."""
    try:
        return f"{host_identity()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return host_identity()


def number_hosts(identities: Sequence[str]) -> list[int]:
    """For each rank the index of its host, in the order in which the hosts first appear."""
    order = list(dict.fromkeys(identities))
    return [order.index(identity) for identity in identities]


def members_of(hosts: Sequence[int], rank: int) -> list[int]:
    """The ranks on the host of `rank`."""
    return [each for each, host in enumerate(hosts) if host == hosts[rank]]


def num_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_idle_core(num_ranks: int) -> bool:
    """Whether `num_ranks` on this host leave a core idle while each computes in as many threads as torch has here."""
    return num_ranks * torch.get_num_threads() < num_cores()


def leaders_of(hosts: Sequence[int]) -> list[int]:
    """The first rank of each host."""
    return [hosts.index(host) for host in dict.fromkeys(hosts)]
