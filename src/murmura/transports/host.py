"""Which host a process is on, and whether a process of this host still lives."""

from __future__ import annotations

import contextlib
import os
import platform
import select
from collections.abc import Sequence


def host_identity() -> str:
    """The same for processes that share a kernel and a network namespace: two namespaces are two hosts."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}:{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return platform.node()


def number_hosts(identities: Sequence[str]) -> list[int]:
    """For each rank the index of its host, in the order in which the hosts first appear."""
    order = list(dict.fromkeys(identities))
    return [order.index(identity) for identity in identities]


class Liveness:
    """Watches processes of this host; those it cannot watch count as alive."""

    def __init__(self, pids: dict[int, int]) -> None:
        """`pids` by rank."""
        self._fds: dict[int, int] = {}
        for rank, pid in pids.items():
            with contextlib.suppress(OSError, AttributeError):  # other pid namespace, or no pidfds here
                self._fds[os.pidfd_open(pid)] = rank

    def dead(self) -> list[int]:
        """The ranks whose process has ended."""
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        return sorted(self._fds[fd] for fd, _ in poll.poll(0))

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
