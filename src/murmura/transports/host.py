"""Which host a process is on, which ranks share one, and whether a process of this host still lives."""

from __future__ import annotations

import os
import platform
import select
import weakref
from collections.abc import Sequence


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


def leaders_of(hosts: Sequence[int]) -> list[int]:
    """The first rank of each host."""
    return [hosts.index(host) for host in dict.fromkeys(hosts)]


class Liveness:
    """Watches processes of this pid namespace; those it cannot watch count as alive."""

    def __init__(self, pids: dict[int, int]) -> None:
        """`pids` by rank."""
        self._fds: dict[int, int] = {}
        self._gone: set[int] = set()  # before they could be watched
        self._release = weakref.finalize(self, _close_all, self._fds)
        for rank, pid in pids.items():
            self.add(rank, pid)

    def add(self, rank: int, pid: int) -> None:
        """Watch the process of `rank`, too."""
        try:
            self._fds[os.pidfd_open(pid)] = rank
        except ProcessLookupError:
            self._gone.add(rank)
        except (OSError, AttributeError, OverflowError):  # no pidfds here
            return

    def dead(self) -> list[int]:
        """The ranks whose process has ended."""
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        return sorted(self._gone | {self._fds[fd] for fd, _ in poll.poll(0)})

    def close(self) -> None:
        self._release()


def _close_all(fds: dict[int, int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
