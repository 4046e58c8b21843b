"""The police: a test that leaves anything behind fails, whatever it asserted.

`traces` lists what a process can leave behind, as seen now. A test is guilty of what is there after it and was not
before, once it had a moment to go away. Every test begins with the same random numbers and one thread for torch.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

GRACE_SECONDS = 2.0  # for threads and processes that have been told to end
TOKEN = "PYTEST_POLICE_TOKEN"  # in the environment of whatever this process starts, so that orphans are known
PROC = Path("/proc")
SHARED = Path("/dev/shm")
MADE_HERE = ("murmura", "torch_", "psm_", "sem.")  # names that this library, torch and multiprocessing would give

SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # when an optimizer or a compiler is first used

_has_token: dict[tuple[int, str], bool] = {}  # by pid and start time: whether the token was in its environment
Traces = dict[tuple[object, ...], str]  # what identifies a thing, and its name in words


def pytest_configure() -> None:
    os.environ[TOKEN] = f"{os.getpid()}-{time.monotonic_ns()}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables that tests recorded, wherever they ran."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    for report in reports:
        for name, value in report.user_properties:
            if name == "table":
                terminalreporter.write_line(str(value))


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start the server that ranks are forked from with pytest imported: a rank then starts in milliseconds.

    The first optimizer of a process makes torch import its compiler, which takes more than a second of every rank.
    """
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "murmura", "pytest"])
    multiprocessing.forkserver.ensure_running()


@pytest.fixture(autouse=True)
def police() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    variables = dict(os.environ)
    before = traces()
    yield
    left = leaks(before)
    changed = changed_variables(variables)
    for name in changed:
        if name in variables:
            os.environ[name] = variables[name]
        else:
            del os.environ[name]
    left += [f"environment variable {name}" for name in changed]
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


def leaks(before: Traces, grace: float = GRACE_SECONDS) -> list[str]:
    """What is here now, was not in `before`, and does not go away within `grace` seconds."""
    deadline = time.monotonic() + grace
    while left := [name for key, name in traces().items() if key not in before]:
        if time.monotonic() > deadline:
            return left
        gc.collect()  # a mapping lives as long as the last tensor in it
        time.sleep(0.01)
    return []


def traces() -> Traces:
    family = relatives()
    found = {("thread", id(thread)): f"thread {thread.name}" for thread in threading.enumerate() if is_watched(thread)}
    found |= {("process", *key): f"process {key[0]} ({name})" for key, name in family.items()}
    found |= descriptors()
    found |= sockets()
    found |= shared_files({os.getpid(), *(pid for pid, _ in family)})
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found["process group",] = "torch's default process group"
    return found


def changed_variables(before: Mapping[str, str]) -> list[str]:
    names = {*before, *os.environ} - {"PYTEST_CURRENT_TEST", *SET_BY_TORCH}
    return sorted(name for name in names if before.get(name) != os.environ.get(name))


def is_watched(thread: threading.Thread) -> bool:
    """Threads that keep a process alive, and the library's own; not pytest's."""
    return (not thread.daemon or thread.name.startswith("murmura")) and not thread.name.startswith("pytest_timeout")


def relatives() -> dict[tuple[int, str], str]:
    """Name by (pid, start time) of every process that descends from this one, orphans included.

    Left out are multiprocessing's two servers, which stay until this process ends.
    """
    own = os.getpid()
    servers = {
        getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None),
        getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None),
    }
    token = f"{TOKEN}={os.environ.get(TOKEN)}".encode()
    parents: dict[int, int] = {}
    names: dict[int, tuple[str, str]] = {}
    ours = {own}
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            name, _, fields = (folder / "stat").read_text().partition("(")[2].rpartition(") ")
            state, parent, *rest = fields.split()
            if state in "ZX" and int(parent) != own:
                continue  # dead, and its own parent's to bury
            pid, start = int(folder.name), rest[17]
            parents[pid], names[pid] = int(parent), (start, name)
            if (pid, start) not in _has_token:
                _has_token[pid, start] = token in (folder / "environ").read_bytes().split(b"\0")
            if _has_token[pid, start]:
                ours.add(pid)
    for pid in parents:
        line = [pid]
        while line[-1] in parents and line[-1] not in ours:
            line.append(parents[line[-1]])
        if line[-1] in ours:
            ours.update(line)
    return {(pid, names[pid][0]): names[pid][1] for pid in ours & names.keys() - servers - {own}}


def descriptors() -> Traces:
    """This process's descriptors of shared segments and of other processes."""
    found: Traces = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith("/memfd:murmura") or "pidfd" in target:
                found["descriptor", entry, target, os.stat(f"/proc/self/fd/{entry}").st_ino] = (
                    f"descriptor {entry} of {target}"
                )
    return found


def sockets() -> Traces:
    """Sockets on which a stranger could call this process: TCP ports, and meeting points of the library."""
    found: Traces = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inode = os.readlink(f"/proc/self/fd/{entry}")
            if not inode.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as copy:
                if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    continue
                name = copy.getsockname()
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    found["port", inode] = f"listening TCP port {name[1]}"
                elif copy.family == socket.AF_UNIX and bytes(name).startswith(b"\0murmura"):
                    found["socket", inode] = f"abstract socket @{bytes(name)[1:].decode()}"
    return found


def shared_files(pids: set[int]) -> Traces:
    """Files in /dev/shm, but for those that a process not in `pids` is using."""
    found: Traces = {}
    for path in SHARED.iterdir():
        if path.name.startswith(MADE_HERE) and not is_used_elsewhere(path, pids):
            found["file", path] = f"file {path}"
    return found


def is_used_elsewhere(path: Path, pids: set[int]) -> bool:
    for folder in PROC.iterdir():
        if folder.name.isdigit() and int(folder.name) not in pids:
            with contextlib.suppress(OSError):
                if str(path) in (folder / "maps").read_text():
                    return True
                if any(os.readlink(fd) == str(path) for fd in (folder / "fd").iterdir()):
                    return True
    return False
