"""What a world could leave behind, or open, on this machine: read from /proc, never asked of murmura.

Every check names one world (by its memfd, its rendezvous or its processes), so that other worlds may run meanwhile.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from murmura.transports.shared_memory.rendezvous import socket_address

PORTS = ("tcp", "tcp6", "udp", "udp6")


def state_of(pid: int) -> str:
    """The state letter of a process's main thread (R, S, T, Z, …); "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_gone(pid: int) -> bool:
    return state_of(pid) in ("", "Z", "X")


def await_state(pid: int, letters: str, within: float = 20.0) -> None:
    """Return once a process is in one of the states `letters`."""
    give_up = time.monotonic() + within
    while (state := state_of(pid)) not in letters or not state:
        assert time.monotonic() < give_up, f"process {pid} is in state {state!r}, not in one of {letters!r}"
        os.sched_yield()


def segments_of(pid: int | str = "self") -> set[int]:
    """Inodes of murmura's memfds that a process has mapped or holds open."""
    inodes = set()
    for line in _lines(f"/proc/{pid}/maps"):
        if "/memfd:murmura" in line:
            inodes.add(int(line.split()[4]))
    for link, target in _links(pid):
        if target.startswith("/memfd:murmura"):
            with contextlib.suppress(OSError):
                inodes.add(os.stat(link).st_ino)
    return inodes


def shm_files_of(pid: int | str = "self") -> list[str]:
    """Files under /dev/shm that a process has mapped or holds open."""
    mapped = [line.split(maxsplit=5)[5] for line in _lines(f"/proc/{pid}/maps") if "/dev/shm/" in line]
    return mapped + [target for _, target in _links(pid) if target.startswith("/dev/shm/")]


def ports_of(pid: int | str = "self") -> list[str]:
    """Lines of the kernel's tables of TCP and UDP sockets that belong to a process."""
    inodes = {target[8:-1] for _, target in _links(pid) if target.startswith("socket:[")}
    return [
        f"{table}: {line.strip()}"
        for table in PORTS
        for line in _lines(f"/proc/{pid}/net/{table}")[1:]
        if line.split()[9] in inodes
    ]


def watch_sockets() -> list[str]:
    """From now on, note every socket of this process that is not a Unix socket, in the list returned."""
    seen: list[str] = []

    def note(event: str, args: tuple[object, ...]) -> None:
        if event == "socket.__new__" and args[1] in (socket.AF_INET, socket.AF_INET6):
            seen.append(f"{event}{args[1:]}")

    sys.addaudithook(note)
    return seen


def assert_nothing_left(job: str, inodes: set[int], pids: list[int]) -> None:
    """After the end of a world: no process, no mapping of its memory, no rendezvous, no file."""
    assert all(is_gone(pid) for pid in pids), {pid: state_of(pid) for pid in pids}
    assert not {pid: left for pid in _pids() if (left := segments_of(pid) & inodes)}, "the segment is still held"
    rendezvous = socket_address(job).replace("\0", "@")
    assert not [line for line in _lines("/proc/net/unix") if line.rstrip().endswith(rendezvous)]
    assert not [name for name in os.listdir("/dev/shm") if job in name]


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:  # it has ended, or belongs to another user
        return []


def _links(pid: int | str) -> list[tuple[str, str]]:
    """The open files of a process: their paths in /proc, and what they are."""
    folder = f"/proc/{pid}/fd"
    links = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                links.append((f"{folder}/{name}", os.readlink(f"{folder}/{name}")))
    return links
