"""The network namespaces that labs consist of: their names, their owners and the processes in them.

A name holds the pid and start time of the process that made the namespace, so that those of killed processes can be
recognised and removed. No other namespace is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from murmura.errors import UsageError

FOLDER = Path("/run/netns")  # where iproute2 keeps the names
COMMAND_SECONDS = 20.0
STOP_SECONDS = 2.0  # for a process to end after SIGTERM, and again after SIGKILL
_NAME = re.compile(r"(murmura-([0-9]+)-([0-9]+)-[0-9a-f]{6})-(?:switch|h[0-9]+)")


def check_tools() -> None:
    """Raise a `UsageError` where namespaces cannot be made."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise UsageError(
            f"simulated hosts need {' and '.join(missing)}, which is not installed here. Install iproute2 "
            "(`apt-get install iproute2`). ThrottledTransport simulates a slow link without it."
        )
    if os.geteuid() != 0:
        raise UsageError(
            "simulated hosts are network namespaces, and making them needs root. Run it with sudo, or in a container "
            "with --privileged. ThrottledTransport simulates a slow link without it."
        )


def command(*words: str) -> str:
    """Run `ip` or `tc` and return its output; a `UsageError` holds its error message."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"`{' '.join(words)}` did not end within {COMMAND_SECONDS:.0f} s. Is the kernel busy?"
        ) from None
    if done.returncode:
        raise UsageError(
            f"`{' '.join(words)}` failed: {done.stderr.strip()}. Simulated hosts need root with the capabilities "
            "NET_ADMIN and SYS_ADMIN, and a kernel with veth, bridge and tbf."
        )
    return done.stdout


def new_lab() -> str:
    """Return a new name for a lab of this process, the prefix of its namespaces."""
    return f"murmura-{os.getpid()}-{_start_time(os.getpid())}-{uuid.uuid4().hex[:6]}"


def labs() -> dict[str, list[str]]:
    """Return the namespaces of every lab on this machine, by lab."""
    found: dict[str, list[str]] = {}
    names = sorted(each.name for each in FOLDER.iterdir()) if FOLDER.is_dir() else []
    for name in names:
        if match := _NAME.fullmatch(name):
            found.setdefault(match[1], []).append(name)
    return found


def owner_lives(lab: str) -> bool:
    """Whether the process that made the lab still runs."""
    _, pid, start, _ = lab.split("-")
    return _start_time(int(pid)) == start


def _start_time(pid: int) -> str:
    """Return the start time in kernel ticks, which with the pid is unique; empty if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def remove(names: Iterable[str]) -> None:
    """Stop every process in these namespaces and remove them; missing ones are ignored."""
    names = list(names)
    _end_processes(names)
    for name in names:
        with contextlib.suppress(UsageError):
            command("ip", "netns", "del", name)


def _end_processes(names: list[str]) -> None:
    own = os.stat("/proc/self/ns/net").st_ino
    inodes = set()
    for name in names:
        with contextlib.suppress(OSError):  # removed meanwhile
            inodes.add((FOLDER / name).stat().st_ino)
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        fds = _processes_in(inodes - {own})
        try:
            for fd in fds:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal_number)
            _await_ends(fds)
        finally:
            for fd in fds:
                os.close(fd)


def _processes_in(inodes: set[int]) -> list[int]:
    """Return a pidfd for each process in one of these network namespaces."""
    fds = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if (folder / "ns/net").stat().st_ino in inodes:
                    fds.append(os.pidfd_open(int(folder.name)))
    return fds


def _await_ends(fds: list[int]) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    waiting = set(fds)
    while waiting and (left := deadline - time.monotonic()) > 0:
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        waiting -= {fd for fd, _ in poll.poll(left * 1000)}
