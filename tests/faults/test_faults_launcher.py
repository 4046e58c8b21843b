"""Faults as the caller of run_world sees them, and the death or interruption of the caller itself."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from culprits import fail_by
from expect import PROMPT_SECONDS
from traces import is_gone, state_of

from murmura import CollectiveMismatch, PeerLost, PeerTimeout, run_world

KINDS = ("threads", "processes")
PROGRAM = Path(__file__).with_name("program.py")


def fail_as(transport, folder, fault):
    """Healthy all-reduces, then rank 1 fails in the way named; every rank leaves its pid in `folder`."""
    (Path(folder) / str(transport.rank)).write_text(str(os.getpid()))
    for _ in range(3):
        transport.all_reduce(torch.ones(1024))
    if transport.rank == 1:
        if fault == "return":
            return
        fail_by(fault)
        if fault == "barrier":
            transport.barrier()
    transport.all_reduce(torch.ones(1024))


def _pids(folder):
    return [int(path.read_text()) for path in Path(folder).iterdir()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("raise", ValueError, "rank 1: the loader broke"),
        ("return", PeerLost, "rank 1 closed its transport and left"),
        ("sys.exit", PeerLost, r"rank 1 left with sys.exit\(7\)"),
        ("barrier", CollectiveMismatch, r"rank 1: barrier\(\)"),
    ],
)
def test_run_world_raises_the_cause(tmp_path, kind, fault, error, words):
    began = time.monotonic()
    with pytest.raises(error, match=words) as caught:
        run_world(fail_as, 3, tmp_path, fault, kind=kind, timeout=20.0)
    assert time.monotonic() - began < 2 * PROMPT_SECONDS
    if error is PeerLost:
        assert caught.value.peer == 1
    if kind == "processes":
        assert len(_pids(tmp_path)) == 3
        assert all(is_gone(pid) for pid in _pids(tmp_path))


@pytest.mark.parametrize(
    ("fault", "words"), [("os._exit", "rank 1 exited with status 7"), ("SIGKILL", "rank 1 was killed by SIGKILL")]
)
def test_run_world_says_how_a_process_died(tmp_path, fault, words):
    began = time.monotonic()
    with pytest.raises(PeerLost, match=words) as caught:
        run_world(fail_as, 3, tmp_path, fault, kind="processes", timeout=20.0)
    assert time.monotonic() - began < 2 * PROMPT_SECONDS
    assert caught.value.peer == 1
    assert all(is_gone(pid) for pid in _pids(tmp_path))


def test_run_world_ends_a_stopped_process(tmp_path):
    with pytest.raises(PeerTimeout, match="is stopped") as caught:
        run_world(fail_as, 3, tmp_path, "SIGSTOP", kind="processes", timeout=1.0)
    assert caught.value.peer == 1
    left = [pid for pid in _pids(tmp_path) if not is_gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)  # or the end of the tests would wait for it
    assert len(_pids(tmp_path)) == 3
    assert not left


# The caller's own end


class _Program:
    """The user's program in a session of its own, as a terminal would run it."""

    def __init__(self, *args):
        self.pidfds = {}
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM, *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        for pidfd in self.pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
        self._process.communicate()

    @property
    def pid(self):
        return self._process.pid

    def await_ranks(self, world_size):
        """The pids of the ranks, once all of them work; from then on their ends, and their parents', are watched."""
        ranks = []
        for _ in range(world_size):
            line = self._process.stdout.readline().split()
            assert len(line) == 3, self._process.stderr.read().decode()
            _, pid, parent = map(int, line)
            ranks.append(pid)
            for each in {pid, parent} - {os.getpid(), *self.pidfds}:
                self.pidfds[each] = os.pidfd_open(each)
        return ranks

    def await_end(self):
        errors = self._process.communicate(timeout=20.0)[1].decode()
        return self._process.returncode, errors

    def expect_ranks_end(self):
        give_up = time.monotonic() + PROMPT_SECONDS
        for pid, pidfd in self.pidfds.items():
            ended = select.select([pidfd], [], [], max(0.0, give_up - time.monotonic()))[0]
            assert ended, f"process {pid} outlived the program, in state {state_of(pid)}"


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("reducing", signal.SIGKILL),
        pytest.param("waiting", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("waiting", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_ranks_do_not_outlive_the_program_that_started_them(how, number):
    with _Program("processes", how, 3) as program:
        program.await_ranks(3)
        os.kill(program.pid, number)
        program.expect_ranks_end()
        assert program.await_end()[0] == -number


@pytest.mark.parametrize(
    ("kind", "whom"),
    [
        ("threads", "program"),
        ("processes", "group"),
        pytest.param("processes", "program", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_program_ends_at_once_with_all_its_ranks(kind, whom):
    """Ctrl-C at a terminal interrupts the whole group of processes; a supervisor may interrupt the program alone."""
    with _Program(kind, "waiting" if kind == "processes" else "reducing", 3) as program:
        program.await_ranks(3)
        (os.kill if whom == "program" else os.killpg)(program.pid, signal.SIGINT)
        interrupted = time.monotonic()
        status, errors = program.await_end()
        assert time.monotonic() - interrupted < 2 * PROMPT_SECONDS
        assert status in (-signal.SIGINT, 128 + signal.SIGINT, 1)
        assert "KeyboardInterrupt" in errors
        assert "threads left: 0" in errors
        program.expect_ranks_end()
