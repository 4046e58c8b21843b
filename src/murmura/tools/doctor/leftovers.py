"""Find what earlier runs may have left: orphan processes, rendezvous sockets, folders. Nothing is removed."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from murmura.tools.doctor.findings import Finding, Section

SETTLE_SECONDS = 3.0  # for a starting world to connect, and for the server of an ended one to exit
LOOK_SECONDS = 0.1
OLD_SECONDS = 3600.0  # folders of running or just ended jobs are younger as a rule
INITS = ("init", "systemd")  # processes that adopt orphans, besides process 1
LAUNCHERS = ("python", "torchrun", "pt_", "mpiexec", "hydra", "srun", "slurmstepd")  # may be process 1 of a container

T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """A process that belongs to a world, or starts the ranks of one."""

    pid: int
    command: str
    parent_pid: int
    parent_name: str

    @property
    def is_orphan(self) -> bool:
        """Whether the process that started it has ended, as far as can be known."""
        adopted = self.parent_pid == 1 or self.parent_name in INITS
        return adopted and not self.parent_name.startswith(LAUNCHERS)


@dataclass(frozen=True)
class RendezvousSocket:
    """An abstract socket at which rank 0 listens for the others; `pid` is None if another user owns it."""

    name: str
    pid: int | None


@dataclass(frozen=True)
class Folder:
    """A temporary folder, and the seconds since its last change."""

    path: str
    age_seconds: float


@dataclass(frozen=True, kw_only=True)
class LeftoverFacts:
    """Processes, sockets and folders of murmura on this host, except this process's own."""

    processes: tuple[Process, ...] = ()
    rendezvous_sockets: tuple[RendezvousSocket, ...] = ()
    folders: tuple[Folder, ...] = ()


def gather(proc: Path = Path("/proc"), temp: Path | None = None, now: float | None = None) -> LeftoverFacts:
    return LeftoverFacts(
        processes=_lasting(lambda: list(_find_processes(proc)), lambda process: process.is_orphan),
        rendezvous_sockets=_lasting(_find_rendezvous_sockets, lambda point: True),
        folders=tuple(_find_folders(temp or Path(tempfile.gettempdir()), time.time() if now is None else now)),
    )


def _lasting(look: Callable[[], list[T]], is_suspect: Callable[[T], bool]) -> tuple[T, ...]:
    """Return what `look` finds, without what disappears by itself within `SETTLE_SECONDS`."""
    deadline = time.monotonic() + SETTLE_SECONDS
    found = look()
    while any(map(is_suspect, found)) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        now = look()
        found = [each for each in found if each in now]
    return tuple(found)


def _find_processes(proc: Path) -> Iterator[Process]:
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is another user's
            process = psutil.Process(pid)
            command = process.cmdline()
            if pid != os.getpid() and command and _belongs(command, proc / str(pid) / "maps"):
                parent = process.parent()
                yield Process(pid, " ".join(command)[:80], parent.pid if parent else 0, parent.name() if parent else "")


def _belongs(command: list[str], maps: Path) -> bool:
    """Whether a process is a rank that shares memory, or the server that ranks are forked from, or a fork of it."""
    line = " ".join(command)
    if command[0].startswith("murmura-") or ("multiprocessing.forkserver" in line and "'murmura'" in line):
        return True
    return "/memfd:murmura" in maps.read_text(errors="replace")


def _find_rendezvous_sockets() -> list[RendezvousSocket]:
    pids: dict[str, int | None] = {}  # by name: the listening socket and its connections have the same
    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections("unix"):
            if (name := str(each.laddr)).startswith("@murmura-"):
                pids[name] = each.pid or pids.get(name)
    return [RendezvousSocket(name, pid) for name, pid in sorted(pids.items())]


def _find_folders(temp: Path, now: float) -> Iterator[Folder]:
    for path in sorted(temp.glob("murmura-*")):
        with contextlib.suppress(OSError):
            age = now - max(each.lstat().st_mtime for each in (path, *path.iterdir()))
            if path.is_dir() and age > OLD_SECONDS:
                yield Folder(str(path), age)


def check(facts: LeftoverFacts) -> list[Finding]:
    orphans = [process for process in facts.processes if process.is_orphan]
    running = len(facts.processes) - len(orphans)
    return [
        _judge_processes(orphans, running),
        _judge_rendezvous_sockets(facts.rendezvous_sockets),
        _judge_folders(facts.folders, running),
    ]


def _judge_processes(orphans: list[Process], running: int) -> Finding:
    others = f"running processes of murmura: {running or 'none'}"
    if not orphans:
        return Section.LEFTOVERS.ok("no orphan processes", others)
    pids = " ".join(str(process.pid) for process in orphans)
    return Section.LEFTOVERS.warning(
        f"orphan processes: {pids}",
        "the processes that started them have ended: " + "; ".join(f"{each.pid} ({each.command})" for each in orphans),
        f"They hold memory and cores. Unless you left a job running: kill {pids}",
    )


def _judge_rendezvous_sockets(points: tuple[RendezvousSocket, ...]) -> Finding:
    if not points:
        return Section.LEFTOVERS.ok("no rendezvous sockets", "no world waits for its ranks")
    owners = [f"{point.name} of {f'process {point.pid}' if point.pid else 'another user'}" for point in points]
    pids = " ".join(dict.fromkeys(str(point.pid) for point in points if point.pid))
    return Section.LEFTOVERS.note(
        f"rendezvous sockets: {len(points)}",
        f"a rank 0 waits there for the others: {', '.join(owners)}",
        "This is normal while a job starts. If it stays, the other ranks never connected"
        + (f": see what became of them, or kill {pids}" if pids else "; tell that user."),
    )


def _judge_folders(folders: tuple[Folder, ...], running: int) -> Finding:
    if not folders:
        return Section.LEFTOVERS.ok("no old folders", "nothing of murmura's is older than an hour")
    oldest = max(folder.age_seconds for folder in folders) / 3600
    unless = "when the jobs that run now have ended" if running else "no job of murmura's is running, so"
    return Section.LEFTOVERS.note(
        f"old folders: {len(folders)}",
        f"up to {oldest:.0f} hours old: " + ", ".join(folder.path for folder in folders),
        f"Runs that were killed left them; {unless} remove them: rm -r {' '.join(folder.path for folder in folders)}",
    )
