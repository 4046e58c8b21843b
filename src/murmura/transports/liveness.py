"""How a killed rank is noticed: the kernel reports the end of a process of this host through its pidfd.

A rank of another host is noticed by its broken connection, which `failure_log` explains.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Mapping

STOPPED = ("T", "t")  # states of a process


class PidfdPoll:
    """Tells whose process has ended, by pidfds that somebody else keeps open; `ranks` by pidfd."""

    def __init__(self, ranks: Mapping[int, int]) -> None:
        self._ranks = dict(ranks)
        self._poll = select.poll()
        self._polling = threading.Lock()  # which refuses a second thread
        for fd in ranks:
            self._poll.register(fd, select.POLLIN)

    def dead(self) -> list[int]:
        """The ranks whose process has ended."""
        with self._polling:
            return sorted(self._ranks[fd] for fd, _ in self._poll.poll(0))


class Liveness(PidfdPoll):
    """Watches processes of this pid namespace, through pidfds of its own; those it cannot watch count as alive."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """`pids` by rank."""
        super().__init__({})
        self._gone: set[int] = set()  # before they could be watched
        self._release = weakref.finalize(self, _close_all, self._ranks)
        for rank, pid in pids.items():
            self.add(rank, pid)

    def add(self, rank: int, pid: int) -> None:
        """Watch the process of `rank`, too."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._gone.add(rank)
        except (OSError, AttributeError, OverflowError):  # no pidfds here
            return
        else:
            self._ranks[fd] = rank
            self._poll.register(fd, select.POLLIN)

    def dead(self) -> list[int]:
        return sorted([*self._gone, *super().dead()])

    def stopped(self) -> list[int]:
        """The ranks whose process is stopped, by a signal or a debugger."""
        return sorted(rank for fd, rank in self._ranks.items() if process_state(fd)[1] in STOPPED)

    def close(self) -> None:
        for fd in self._ranks:
            self._poll.unregister(fd)
        self._release()


def _close_all(fds: dict[int, int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()


def open_life_fd() -> tuple[int, int]:
    """Open a descriptor that becomes readable when this process dies; also return one to keep open until then, or -1.

    It is a pidfd. Where the kernel has none (gVisor, for one), it is the read end of a pipe, which becomes readable
    when the write end is closed: too late, if a forked child still holds that.
    """
    try:
        return os.pidfd_open(os.getpid()), -1
    except (OSError, AttributeError):
        return os.pipe()


def process_state(pidfd: int) -> tuple[int, str]:
    """The pid and the state letter (R, S, T, Z, …) of a process; (-1, "") if /proc does not show it."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as info:
            pid = next(int(line.split()[1]) for line in info if line.startswith("Pid:"))
        with open(f"/proc/{pid}/stat") as stat:
            return pid, stat.read().rpartition(")")[2].split()[0]
    except (OSError, StopIteration):
        return -1, ""
