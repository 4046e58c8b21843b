"""run_world and connect: results in rank order, errors with their rank, and nothing left of a world that has ended."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import run_forked, script
from murmura import (
    ConfigError,
    DistributedConfig,
    InProcessTransport,
    MurmuraError,
    PeerLost,
    PeerTimeout,
    RendezvousError,
    Transport,
    UsageError,
    connect,
    run_world,
)

KINDS = ("threads", "processes")
SECONDS = 45.0  # for a script, which imports torch first


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


# Results


def tell_place(transport: Transport, *args: Any) -> tuple[Any, ...]:
    return transport.rank, transport.world_size, transport.hosts, *args


def test_results_come_in_rank_order(kind: str) -> None:
    for size in (1, 2, 5):
        results = run_world(tell_place, size, "a", [1, 2], kind=kind)
        assert [result[0] for result in results] == list(range(size))
        assert all(result[1:] == (size, (0,) * size, "a", [1, 2]) for result in results)


def test_threads_are_the_default_and_each_rank_has_its_own() -> None:
    names = run_world(lambda transport: threading.current_thread().name, 3)
    assert names == ["murmura-rank0", "murmura-rank1", "murmura-rank2"]


def tell_process(transport: Transport) -> tuple[int, str]:
    return os.getpid(), multiprocessing.current_process().name


def test_each_rank_of_a_world_of_processes_has_its_own() -> None:
    results = run_world(tell_process, 3, kind="processes")
    assert len({os.getpid(), *(pid for pid, _ in results)}) == 4
    assert [name for _, name in results] == ["murmura-rank0", "murmura-rank1", "murmura-rank2"]


def test_pretended_hosts(kind: str) -> None:
    assert [result[2] for result in run_world(tell_place, 3, kind=kind, hosts=[0, 1, 1])] == [(0, 1, 1)] * 3


def return_tensors(transport: Transport) -> dict[str, Any]:
    allocated = transport.allocate(300_000)
    allocated.fill_(transport.rank)
    return {
        "allocated": allocated,
        "slice": allocated[5:10],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "nested": [None, (torch.arange(3), "text")],
    }


def test_results_outlive_their_world(kind: str) -> None:
    results = run_world(return_tensors, 2, kind=kind)
    for rank, result in enumerate(results):
        assert result["allocated"].eq(rank).all()
        assert result["slice"].tolist() == [rank] * 5
        assert isinstance(result["parameter"], torch.nn.Parameter)
        assert result["half"].dtype == torch.bfloat16
        assert result["nested"][1][0].tolist() == [0, 1, 2]


def add_to(transport: Transport, tensor: torch.Tensor) -> float:
    return transport.all_reduce(tensor + transport.rank).sum().item()


def test_arguments_reach_every_rank(kind: str) -> None:
    assert run_world(add_to, 3, torch.ones(2), kind=kind) == [12.0] * 3


def test_threads_take_any_callable() -> None:
    offset = 10

    def local(transport: Transport, scale: int) -> int:
        return offset + scale * transport.rank

    class Callme:
        def __call__(self, transport: Transport) -> int:
            return transport.rank

    assert run_world(local, 3, 2) == [10, 12, 14]
    assert run_world(lambda transport: transport.rank, 2) == [0, 1]
    assert run_world(Callme(), 2) == [0, 1]


def test_worlds_in_a_world(kind: str) -> None:
    assert run_world(nest, 2, kind=kind) == [[0, 1, 2], [10, 11, 12]]


def nest(transport: Transport) -> list[int]:
    return run_world(lambda inner: 10 * transport.rank + inner.rank, 3)


def test_worlds_at_the_same_time(kind: str) -> None:
    results: dict[int, list[Any]] = {}

    def start(number: int) -> None:
        results[number] = run_world(add_to, 2, torch.full((1,), float(number)), kind=kind)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [2.0 * number + 1.0] * 2 for number in range(3)}


# Functions that a process cannot import


def test_processes_refuse_a_local_function() -> None:
    def local(transport: Transport) -> None: ...

    with pytest.raises(UsageError, match=r"local.*top level of a module.*kind='threads'"):
        run_world(local, 2, kind="processes")


def test_processes_refuse_a_lambda() -> None:
    with pytest.raises(UsageError, match=r"lambda.*top level of a module.*kind='threads'"):
        run_world(lambda transport: None, 2, kind="processes")


def test_processes_refuse_arguments_that_cannot_be_pickled() -> None:
    with pytest.raises(UsageError, match=r"arguments for tell_place cannot be pickled"):
        run_world(tell_place, 2, threading.Lock(), kind="processes")


def unpicklable(transport: Transport) -> Callable[[], int]:
    return lambda: transport.rank


def test_a_result_that_cannot_be_pickled() -> None:
    with pytest.raises(UsageError, match=r"result of rank [01] cannot be pickled"):
        run_world(unpicklable, 2, kind="processes")
    assert [result() for result in run_world(unpicklable, 2)] == [0, 1]


# Settings


def test_settings_that_make_no_sense() -> None:
    for settings, words in (
        ({"kind": "fibres"}, r"kind='fibres'.*'threads', 'processes'"),
        ({"transport": "pigeon"}, r"transport='pigeon'.*'in_process', 'shared_memory'"),
        ({"transport": "shared_memory"}, "threads"),
        ({"kind": "processes", "transport": "in_process"}, "processes"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": -1.0}, "timeout"),
        ({"timeout": float("nan")}, "timeout=nan is not a finite number above 0"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": "x"}, "timeout='x'"),
        ({"hosts": [0]}, "host"),
        ({"hosts": "x"}, r"hosts='x': name a host from 0 on for each of the 2 ranks"),
        ({"hosts": "xy"}, "hosts='xy'"),
        ({"hosts": [0, -1]}, r"hosts=\[0, -1\]"),
        ({"hosts": [0, None]}, r"hosts=\[0, None\]"),
        ({"hosts": 2}, "hosts=2"),
        ({"kind": "processes", "hosts": [0]}, "host"),
    ):
        with pytest.raises(ConfigError, match=words):
            run_world(tell_place, 2, **settings)
    for size in (0, -1, 2.0, True, "2", None):
        with pytest.raises(ConfigError, match="at least one rank"):
            run_world(tell_place, size)


# Errors


class Odd(Exception):
    """Does not survive pickling: it is rebuilt from its one argument, and wants two."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Plain(ValueError):
    pass


ERRORS: dict[str, tuple[Callable[[], BaseException], type[BaseException]]] = {
    "ValueError": (lambda: ValueError("went wrong"), ValueError),
    "KeyError": (lambda: KeyError("went wrong"), KeyError),
    "Plain": (lambda: Plain("went wrong"), Plain),
    "OSError": (lambda: OSError(2, "went wrong"), FileNotFoundError),
    "ConfigError": (lambda: ConfigError("went wrong"), ConfigError),
    "no words": (lambda: RuntimeError(), RuntimeError),
    "AssertionError": (lambda: AssertionError("went wrong"), AssertionError),
}


def fail(transport: Transport, culprit: int, error: str) -> None:
    """Rank `culprit` fails while the others wait for it, in a call that would never end."""
    transport.all_reduce(torch.ones(3))
    if transport.rank == culprit:
        raise ERRORS[error][0]()
    while True:
        transport.all_reduce(torch.ones(3))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("culprit", [0, 2])
def test_the_error_of_a_rank_is_raised_with_its_rank(kind: str, error: str, culprit: int) -> None:
    began = time.monotonic()
    with pytest.raises(ERRORS[error][1]) as caught:
        run_world(fail, 3, culprit, error, kind=kind)
    assert time.monotonic() - began < 10
    assert type(caught.value) is ERRORS[error][1]
    told = f"{caught.value} {caught.value.__notes__}"
    assert f"rank {culprit}" in told
    if error != "no words":
        assert "went wrong" in told
    if len(caught.value.args) == 1:
        assert f"rank {culprit}: went wrong" in str(caught.value)


def test_the_traceback_of_another_process_is_told() -> None:
    with pytest.raises(ValueError, match="rank 1: went wrong") as caught:
        run_world(fail, 2, 1, "ValueError", kind="processes")
    assert "in fail" in "".join(caught.value.__notes__)


def raise_odd(transport: Transport) -> None:
    if transport.rank == 1:
        raise Odd("this", "that")
    transport.barrier()


def test_an_error_that_cannot_be_pickled() -> None:
    with pytest.raises(MurmuraError, match=r"rank 1: Odd: this and that"):
        run_world(raise_odd, 2, kind="processes")
    with pytest.raises(Odd, match="rank 1: this and that"):
        run_world(raise_odd, 2)


def raise_local(transport: Transport) -> None:
    class LocalError(Exception):
        pass

    raise LocalError("from within")


def test_an_error_of_a_local_class() -> None:
    with pytest.raises(MurmuraError, match="LocalError: from within"):
        run_world(raise_local, 2, kind="processes")


def leave(transport: Transport, how: str) -> None:
    if transport.rank == 1:
        if how == "sys.exit":
            sys.exit(3)
        os._exit(3) if how == "os._exit" else os.kill(os.getpid(), signal.SIGKILL)
    transport.barrier()


def test_a_rank_that_exits(kind: str) -> None:
    with pytest.raises(PeerLost, match=r"rank 1.*3"):
        run_world(leave, 2, "sys.exit", kind=kind)


@pytest.mark.parametrize(("how", "words"), [("os._exit", "status 3"), ("kill", "SIGKILL")])
def test_a_process_that_ends_without_a_word(how: str, words: str) -> None:
    with pytest.raises(PeerLost, match=f"rank 1.*{words}"):
        run_world(leave, 2, how, kind="processes")


def lag(transport: Transport, event: threading.Event | None) -> None:
    transport.barrier()
    if transport.rank == 1:
        if event is None:
            signal.pause()
        else:
            event.wait()


def test_a_process_that_never_ends_is_killed_and_named() -> None:
    began = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"rank 1 had not ended 1\.0 s after the last of the others; it was killed"):
        run_world(lag, 3, None, kind="processes", timeout=1.0)
    assert time.monotonic() - began < 10


def test_a_thread_that_never_ends_is_named() -> None:
    event = threading.Event()
    try:
        with pytest.raises(PeerTimeout, match=r"rank 1 had not ended 1\.0 s after .*cannot be killed"):
            run_world(lag, 3, event, timeout=1.0)
    finally:
        event.set()


def wait_in_vain(transport: Transport) -> None:
    if transport.rank == 0:
        transport.recv(torch.zeros(1), 1)
    else:
        transport.recv(torch.zeros(1), 0)


def test_the_deadline_of_each_wait(kind: str) -> None:
    began = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"rank [01] waited 1\.0 s for rank [01] in exchange"):
        run_world(wait_in_vain, 2, kind=kind, timeout=1.0)
    assert time.monotonic() - began < 10


def test_the_next_world_knows_nothing_of_a_failed_one(kind: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="went wrong"):
            run_world(fail, 2, 0, "ValueError", kind=kind)
        assert run_world(add_to, 2, torch.ones(1), kind=kind) == [3.0, 3.0]


# Scripts


class Script:
    """A program of a user, in a folder of its own."""

    def __init__(self, folder: Path, source: str) -> None:
        self.path = folder / "program.py"
        self.path.write_text(source)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.path), *arguments]
        return subprocess.run(
            command, cwd=self.path.parent, env=clean(), capture_output=True, text=True, timeout=SECONDS
        )

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """In a session of its own, as a terminal gives each job its own group of processes."""
        return subprocess.Popen(
            [sys.executable, str(self.path), *arguments],
            cwd=self.path.parent,
            env=clean() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def clean() -> dict[str, str]:
    """The environment without what a launcher, or another test, would tell a rank."""
    names = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "SLURM", "OMPI", "PMI", "MPI_", "MURMURA", "TORCHELASTIC")
    return {name: value for name, value in os.environ.items() if not name.startswith(names)}


@contextlib.contextmanager
def ended(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """See to it that none of them is left."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


FUNCTIONS_IN_MAIN = """
import torch
from murmura import run_world

OFFSET = 5

class Result:
    def __init__(self, value):
        self.value = value

def helper(value):
    return value + OFFSET

def work(transport, scale):
    return Result(helper(transport.all_reduce(torch.ones(2) * scale).sum().item()))

def fail(transport):
    raise Wrong("as it must")

class Wrong(Exception):
    pass

if __name__ == "__main__":
    OFFSET = 100  # of this process only; the ranks' processes import the module anew
    for kind in ("threads", "processes"):
        print(kind, [result.value for result in run_world(work, 2, 3.0, kind=kind)])
        try:
            run_world(fail, 2, kind=kind)
        except Wrong as error:
            print(kind, error)
"""


def test_functions_of_a_script(tmp_path: Path) -> None:
    done = Script(tmp_path, FUNCTIONS_IN_MAIN).run()
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "threads [112.0, 112.0]"
    assert lines[1] in ("threads rank 0: as it must", "threads rank 1: as it must")
    assert lines[2] == "processes [17.0, 17.0]"
    assert lines[3] in ("processes rank 0: as it must", "processes rank 1: as it must")


def test_a_script_without_its_guard(tmp_path: Path) -> None:
    source = """
from murmura import run_world

def work(transport):
    return transport.rank

print(run_world(work, 2, kind="processes"))
"""
    done = Script(tmp_path, source).run()
    assert done.returncode not in (0, None)
    assert 'if __name__ == "__main__":' in done.stderr
    assert "[0, 1]" not in done.stdout


INTERACTIVE = """
from murmura import UsageError, run_world
def work(transport):
    return transport.rank
print(run_world(work, 2))
try:
    run_world(work, 2, kind="processes")
except UsageError as error:
    print(error)
"""


@pytest.mark.parametrize("way", ["-c", pytest.param("-", marks=pytest.mark.slow)])
def test_a_function_defined_interactively(way: str) -> None:
    command = [sys.executable, "-c", INTERACTIVE] if way == "-c" else [sys.executable, "-"]
    done = subprocess.run(
        command, input=INTERACTIVE, env=clean(), capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first == "[0, 1]"
    assert "work was defined in an interactive session" in second
    assert "kind='threads'" in second


BUSY = """
import os, signal, sys
import torch
from murmura import run_world

def work(transport):
    tensors = [torch.ones(8), torch.ones(100_000)]
    for tensor in tensors:
        transport.all_reduce(tensor, "mean")
    os.write(1, f"{os.getpid()}\\n".encode())  # a line in one piece, whatever other threads write
    while True:
        for tensor in tensors:
            transport.all_reduce(tensor, "mean")

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever this was started from ignores
    run_world(work, 3, kind=sys.argv[1])
"""


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def read_line(process: subprocess.Popen[str], deadline: float) -> str:
    assert select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0], "no word in time"
    return os.read(process.stdout.fileno(), 4096).decode()


@pytest.mark.parametrize(
    ("kind", "whom"),
    [
        ("threads", "program"),
        ("processes", "everybody"),
        pytest.param("processes", "program", marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_ends_a_busy_world(tmp_path: Path, kind: str, whom: str) -> None:
    process = Script(tmp_path, BUSY).start(kind)
    with ended([process]):
        words, deadline = "", time.monotonic() + SECONDS
        while len(words.split()) < 3:
            words += read_line(process, deadline)
        pids = {int(word) for word in words.split()} | {process.pid}
        assert len(pids) == (1 if kind == "threads" else 4)
        assert all(map(exists, pids))
        began = time.monotonic()
        (os.killpg if whom == "everybody" else os.kill)(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=SECONDS)
        assert time.monotonic() - began < 10
        assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 1)
        assert "KeyboardInterrupt" in told
        while any(map(exists, pids)):
            assert time.monotonic() - began < 10, "a rank outlives the program"
            time.sleep(0.01)


# connect


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - clean().keys():
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_launcher")
def test_a_world_of_one_needs_nothing() -> None:
    with connect() as transport:
        assert isinstance(transport, InProcessTransport)
        assert (transport.rank, transport.world_size) == (0, 1)
        assert transport.all_reduce(torch.full((3,), 7.0), "mean").tolist() == [7.0] * 3


def test_threads_of_one_process_are_not_connected_so() -> None:
    config = DistributedConfig(world_size=2, rank=1, transport="in_process")
    with pytest.raises(ConfigError, match=r"rank 1 of 2 processes.*run_world\(fn, 2\).*shared_memory"):
        connect(config)


def test_shared_memory_does_not_reach_another_host() -> None:
    config = DistributedConfig(world_size=4, rank=0, local_world_size=2, transport="shared_memory")
    with pytest.raises(ConfigError, match="only 2 of the 4 ranks"):
        connect(config)


@pytest.mark.parametrize(("rank", "missing"), [(0, (1, 2)), (2, (0,))])
def test_ranks_that_do_not_come_are_named(rank: int, missing: tuple[int, ...]) -> None:
    config = DistributedConfig(
        world_size=3, rank=rank, local_world_size=3, local_rank=rank, job_id=f"missing-{os.getpid()}", timeout=0.5
    )
    began = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        connect(config)
    assert time.monotonic() - began < 10
    assert caught.value.missing == missing
    assert ", ".join(map(str, missing)) in str(caught.value)
    assert "job_id" in str(caught.value)


AVERAGE = """
import json, os, re
from pathlib import Path
import torch
from murmura import connect

with connect() as transport:
    tensors = [torch.full((length,), float(os.environ["VALUE"])) for length in (3, 200_000)]
    for tensor in tensors:
        transport.all_reduce(tensor, "mean")
    inodes = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
    ports = [
        line
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
        if f"socket:[{line.split()[9]}]" in inodes
    ]
    transport.barrier()
print(json.dumps([type(transport).__name__, [tensor.unique().tolist() for tensor in tensors], ports]))
"""


def test_two_jobs_at_once_on_one_host_open_no_port(tmp_path: Path) -> None:
    program = Script(tmp_path, AVERAGE)

    def average(job: int, rank: int) -> Any:
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        place |= {"TORCHELASTIC_RUN_ID": f"job-{job}-{os.getpid()}", "VALUE": str(100 * job + 2 * rank)}
        done = run_forked(script, [str(program.path)], variables=place, timeout=SECONDS)
        assert done.stderr == ""
        return json.loads(done.stdout)

    with ThreadPoolExecutor(4) as pool:
        told = list(pool.map(average, (0, 1, 0, 1), (0, 0, 1, 1)))
    assert told == [["SharedMemoryTransport", [[mean], [mean]], []] for mean in (1.0, 101.0, 1.0, 101.0)]
