"""`murmura run`: what ranks are told, what the user sees, and how it ends."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch.scripts import COMMAND, FAIL, ONCE, PORTS, STAY, STOP, TELL, murmura_run, write
from murmura import ConfigError, DistributedConfig
from murmura.launch.launcher import launch
from murmura.launch.plan import LaunchPlan, parse_num_ranks, read_secret
from murmura.transports.host import num_cores


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmura.launch.supervisor.GRACE_SECONDS", 0.5)


def told(output: str) -> dict[int, dict[str, Any]]:
    """What the ranks said with TELL, by the rank that stands in front of the line."""
    lines = re.findall(r"^\[rank (\d+)\] (\{.*)$", output, re.MULTILINE)
    return {int(rank): json.loads(text) for rank, text in lines}


def test_every_rank_gets_its_place_and_its_arguments_and_its_output_carries_its_rank(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("swordfish\n")
    options = ["--algorithm", "bytegrad", "--transport", "shared_memory", "--secret-file", str(secret)]
    options += ["--device", "cpu"]
    done = murmura_run("-n", "3", *options, write(tmp_path, TELL), "--lr", "0.1", "-n", "x", OMP_NUM_THREADS="")
    assert done.returncode == 0, done.stderr
    said = told(done.stdout)
    assert sorted(said) == [0, 1, 2]
    for rank, each in said.items():
        assert (each["RANK"], each["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert each["args"] == ["--lr", "0.1", "-n", "x"]
        carried = each["MURMURA_ALGORITHM"], each["MURMURA_TRANSPORT"], each["MURMURA_SECRET"], each["MURMURA_DEVICE"]
        assert carried == ("bytegrad", "shared_memory", "swordfish", "cpu")
        assert each["OMP_NUM_THREADS"] == str(max(1, num_cores() // 3))
    assert len({each["MURMURA_JOB_ID"] for each in said.values()}) == 1
    assert [f"[rank {rank}] to stderr" in done.stderr.splitlines() for rank in range(3)] == [True] * 3
    assert done.stderr.count("one torch thread each") == (num_cores() < 3)
    assert "swordfish" not in done.stderr


def test_on_one_host_nothing_listens_on_a_port(tmp_path: Path) -> None:
    done = murmura_run("-n", "2", write(tmp_path, PORTS))
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] SharedMemoryTransport 0" for rank in range(2)]


def run_here(script: str, *args: str, **options: Any) -> tuple[int, list[str]]:
    """What `murmura run` does, in this process: the exit status, and what was said."""
    said: list[str] = []
    plan = LaunchPlan(**{"command": (sys.executable, script, *args), "num_ranks": 1, **options})
    return launch(plan, said.append), said


@pytest.mark.parametrize(
    ("how", "ranks", "status", "words"),
    [
        ("raise", 2, 1, "exited with status 1:\nTraceback (most recent call last):\n"),
        ("7", 1, 7, "exited with status 7. It printed nothing on standard error."),
        ("kill", 1, 137, "was killed by SIGKILL. It printed nothing on standard error."),
    ],
)
def test_a_failure_is_shown_last_and_its_status_is_that_of_the_command(
    tmp_path: Path, how: str, ranks: int, status: int, words: str
) -> None:
    who = ranks - 1
    ended, said = run_here(write(tmp_path, FAIL), how, str(who), num_ranks=ranks)
    assert ended == status
    assert said[-1].startswith(f"rank {who} on {socket.gethostname()} {words}")
    assert how != "raise" or said[-1].endswith("\nValueError: no good")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_signal_is_passed_on_and_no_rank_is_left(tmp_path: Path, number: signal.Signals) -> None:
    line = [*COMMAND, "-n", "2", write(tmp_path, STAY)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        pids = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
        launcher.send_signal(number)
        rest = launcher.stdout.read()
        assert launcher.wait(20) == 128 + number
        assert f"ended by {number.name}" in launcher.stderr.read()
    assert rest.count(f"told {number.name}") == 2
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_when_the_launcher_is_killed_its_ranks_end_too_and_nothing_is_left(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    line = ["env", f"TMPDIR={temporary}", *COMMAND, "-n", "2", write(tmp_path, STAY)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        ranks = [os.pidfd_open(int(launcher.stdout.readline().split()[-1])) for _ in range(2)]
        launcher.kill()
        for rank in ranks:
            assert select.select([rank], [], [], 10)[0], "a rank outlived its launcher"
            os.close(rank)
    assert os.listdir(temporary) == []


@pytest.mark.timed
def test_a_stopped_rank_does_not_hold_up_the_end(tmp_path: Path) -> None:
    began = time.monotonic()
    status, said = run_here(write(tmp_path, STOP), str(tmp_path / "pid"), num_ranks=2)
    assert time.monotonic() - began < 4
    assert (status, said[-1].startswith("rank 0 on ")) == (3, True)
    assert not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text()}")


def test_torch_s_own_launcher_may_be_heard_again_afterwards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "torch.distributed.elastic"):
        assert run_here(write(tmp_path, TELL))[0] == 0
        assert logging.getLogger("torch.distributed.elastic").level == logging.WARNING


def test_after_a_failure_all_ranks_are_started_again_as_another_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    script = write(tmp_path, ONCE)
    status, said = run_here(script, num_ranks=2, max_restarts=2, log_dir=logs)
    assert (status, len(said), capfd.readouterr().out) == (0, 1, "")
    assert said[0].endswith("Starting all ranks again: restart 1 of 2.")
    jobs = [[(logs / f"{part}rank{rank}.out").read_text() for rank in range(2)] for part in ("", "restart1/")]
    assert jobs[0][0] == jobs[0][1] != jobs[1][0] == jobs[1][1]


def test_restarts_come_to_an_end(tmp_path: Path) -> None:
    status, said = run_here(write(tmp_path, FAIL), "5", "0", max_restarts=1)
    assert status == 5
    assert ["exited with status 5" in each for each in said] == [True, True]


def test_a_module_and_what_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, TELL)
    done = murmura_run("-n", "1", "-m", "script", "x", cwd=tmp_path, OMP_NUM_THREADS="3")
    said = told(done.stdout)[0]
    assert (said["args"], said["OMP_NUM_THREADS"]) == (["x"], "3")
    done = murmura_run("-n", "1", str(tmp_path / "nowhere.py"))
    assert done.returncode == 2
    assert "can't open file" in done.stderr.rpartition("murmura run: ")[2]
    status, said = run_here("", command=("no-such-program",))
    assert (status, "no-such-program cannot be started" in said[-1]) == (1, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_ranks": 0}, "start at least one"),
        ({"num_nodes": 2, "node_rank": 2, "coordinator": "a:1"}, "counts from 0"),
        ({"num_nodes": 2}, "need --coordinator HOST:PORT"),
        ({"num_nodes": 2, "coordinator": "nohost"}, "is not host:port"),
        ({"max_restarts": -1}, "give 0 or more"),
        ({"timeout": float("nan")}, r"MURMURA_TIMEOUT.* has 1 fault:\s+- timeout=nan is not a finite number"),
        ({"timeout": 0.0}, "timeout=0.0 is not"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LaunchPlan(**{"command": ("true",), "num_ranks": 1, **options})


def test_numbers_of_ranks_and_secrets_are_read_with_care(tmp_path: Path) -> None:
    assert parse_num_ranks("4") == 4
    assert parse_num_ranks("auto") >= 1
    for text in ("0", "-1", "many", "", "1.5", "²"):
        with pytest.raises(ConfigError, match="number of ranks"):
            parse_num_ranks(text)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_secret(empty)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "nowhere")
    assert "swordfish" not in repr(LaunchPlan(command=("true",), num_ranks=1, secret="swordfish"))


def test_what_the_launcher_carries_is_no_partial_environment() -> None:
    alone = {"MURMURA_ALGORITHM": "bytegrad", "MURMURA_TRANSPORT": "in_process", "MURMURA_SECRET": "swordfish"}
    config = DistributedConfig.from_env(alone)
    assert (config.world_size, config.algorithm, config.secret) == (1, "bytegrad", "swordfish")
