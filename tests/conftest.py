"""The police: a test that leaves anything behind fails, whatever it asserted.

`Traces` are what a process can leave behind, as seen now. A test is guilty of what is there after it and was not
before, once it had a moment to go away. Every test begins with the same random numbers and one thread for torch.

Thousands of tests pay for this, so nothing is read about processes and files that were there before the test.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

GRACE_SECONDS = 2.0  # for threads and processes that have been told to end
TOKEN = "PYTEST_POLICE_TOKEN"  # in the environment of whatever this process starts, so that orphans are known
PROC = Path("/proc")
SHARED = Path("/dev/shm")
MADE_HERE = ("murmura", "torch_", "psm_", "sem.")  # names that this library, torch and multiprocessing would give

SET_BY_TORCH = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # when an optimizer or a compiler is first used

Traces = dict[tuple[object, ...], str]  # what identifies a thing, and its name in words


@dataclass(frozen=True)
class Before:
    """What was there when a test began."""

    own: Traces  # threads, descriptors and ports of this process
    pids: set[int]  # of the machine
    files: set[str]  # in shared memory


def pytest_configure() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started this in the background
    os.environ[TOKEN] = f"{os.getpid()}-{time.monotonic_ns()}"
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start: more of them than processors run at a time


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Make no test of a long grid that the run leaves out: there are more of them than others, in every worker."""
    yield
    if "not slow" in metafunc.config.option.markexpr:
        if metafunc.definition.get_closest_marker("slow"):
            metafunc._calls.clear()  # one is made all the same, and deselected
        else:
            fast = [call for call in metafunc._calls if not any(mark.name == "slow" for mark in call.marks)]
            metafunc._calls[:] = fast or metafunc._calls[:1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put timed tests last: by then no worker has another kind, and the machine is not crowded."""
    items.sort(key=lambda item: item.get_closest_marker("timed") is not None)


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
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "murmura", "murmura.tools.cli.main", "pytest"])
    multiprocessing.forkserver.ensure_running()
    gc.freeze()  # a collection then skips all that torch imports, which takes a quarter of a second


@pytest.fixture(autouse=True)
def police() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(0)  # torch.manual_seed notes the call for devices that are not there
    variables = dict(os.environ)
    before = Before(own_traces(), pids(), set(os.listdir(SHARED)))
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


def leaks(before: Before, grace: float = GRACE_SECONDS) -> list[str]:
    """What is here now, was not in `before`, and does not go away within `grace` seconds."""
    deadline = time.monotonic() + grace
    while left := list(new_traces(before).values()):
        if time.monotonic() > deadline:
            return left
        gc.collect()  # a mapping lives as long as the last tensor in it
        time.sleep(0.01)
    return []


def own_traces() -> Traces:
    found: Traces = {}
    for thread in threading.enumerate():
        if is_watched(thread):
            found["thread", id(thread)] = f"thread {thread.name}"
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found |= descriptor(int(entry), os.readlink(f"/proc/self/fd/{entry}"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found["process group",] = "torch's default process group"
    return found


def new_traces(before: Before) -> Traces:
    """What is here now and was not there before."""
    found = {key: name for key, name in own_traces().items() if key not in before.own}
    family = relatives(pids() - before.pids)
    found |= {("process", pid): f"process {pid} ({name})" for pid, name in family.items()}
    for name in set(os.listdir(SHARED)) - before.files:
        if name.startswith(MADE_HERE) and not is_used_elsewhere(SHARED / name, {os.getpid(), *family}):
            found["file", name] = f"file {SHARED / name}"
    return found


def pids() -> set[int]:
    return {int(name) for name in os.listdir(PROC) if name.isdigit()}


def changed_variables(before: Mapping[str, str]) -> list[str]:
    names = {*before, *os.environ} - {"PYTEST_CURRENT_TEST", *SET_BY_TORCH}
    return sorted(name for name in names if before.get(name) != os.environ.get(name))


def is_watched(thread: threading.Thread) -> bool:
    """Threads that keep a process alive, and the library's own; not pytest's."""
    return (not thread.daemon or thread.name.startswith("murmura")) and not thread.name.startswith("pytest_timeout")


def relatives(candidates: set[int]) -> dict[int, str]:
    """Name by pid of the candidates that descend from this process, orphans included.

    Left out are multiprocessing's two servers, which stay until this process ends.
    """
    servers = {
        getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None),
        getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None),
    }
    found = {}
    for pid in candidates - servers:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            name, state, parent = status(pid)
            if parent == os.getpid() or (state not in "ZX" and is_relative(pid)):  # the dead are their parent's to bury
                found[pid] = name
    return found


def is_relative(pid: int) -> bool:
    """Whether this process, or one that has its token, is among the process and its ancestors."""
    token = f"{TOKEN}={os.environ.get(TOKEN)}".encode()
    while pid > 1:
        if pid == os.getpid() or token in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            return True
        _, _, pid = status(pid)
    return False


def status(pid: int) -> tuple[str, str, int]:
    """Name, state and parent of a process."""
    name, _, fields = (PROC / str(pid) / "stat").read_text().partition("(")[2].rpartition(") ")
    state, parent, *_ = fields.split()
    return name, state, int(parent)


def descriptor(number: int, target: str) -> Traces:
    """A descriptor of this process, if it is a shared segment, another process, or a socket on which a stranger could
    call: a TCP port, or the library's own rendezvous."""
    if target.startswith("/memfd:murmura") or "pidfd" in target:
        return {("descriptor", number, target, os.fstat(number).st_ino): f"descriptor {number} of {target}"}
    if target.startswith("socket:"):
        with socket.socket(fileno=os.dup(number)) as copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                name = copy.getsockname()
                if copy.family in (socket.AF_INET, socket.AF_INET6):
                    return {("port", target): f"listening TCP port {name[1]}"}
                if copy.family == socket.AF_UNIX and bytes(name).startswith(b"\0murmura"):
                    return {("socket", target): f"abstract socket @{bytes(name)[1:].decode()}"}
    return {}


def is_used_elsewhere(path: Path, pids: set[int]) -> bool:
    for folder in PROC.iterdir():
        if folder.name.isdigit() and int(folder.name) not in pids:
            with contextlib.suppress(OSError):
                if str(path) in (folder / "maps").read_text():
                    return True
                if any(os.readlink(fd) == str(path) for fd in (folder / "fd").iterdir()):
                    return True
    return False
