"""The police of conftest.py catches each kind of thing that a test can leave behind, and only that."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUITE = '''
import os, signal, socket, subprocess, sys, tempfile, threading, time
import torch
import torch.distributed
from murmura import InProcessTransport

kept, orphans = [], []


def test_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, args=(20,), name="stray").start()


def test_rank_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, args=(20,), name="murmura-rank7", daemon=True).start()


def test_open_transport():
    transport, other = InProcessTransport.create_group(2)
    transport.all_reduce(torch.ones(3), async_op=True)
    kept.append((transport, other))


def test_child():
    kept.append(subprocess.Popen(["sleep", "20"]))


def test_orphan():
    script = "import subprocess; print(subprocess.Popen(['sleep', '20'], stdout=-3, stderr=-3).pid)"
    orphans.append(int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout))


def test_memory():
    kept.append(os.memfd_create("murmura"))


def test_process_descriptor():
    kept.append(os.pidfd_open(os.getpid()))


def test_file():
    kept.append(tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="murmura-police-test-"))


def test_variable():
    os.environ["POLICE_TEST"] = "1"


def test_changed_variable():
    del os.environ["HOME"]


def test_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))


def test_rendezvous():
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].bind("\\0murmura-police-test")
    kept[-1].listen()


def test_process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def test_innocent(monkeypatch):
    monkeypatch.setenv("POLICE_TEST", "2")
    thread = threading.Thread(target=time.sleep, args=(0.1,))  # outlives the test, within its grace
    thread.start()
    with socket.create_server(("127.0.0.1", 0)), InProcessTransport.create_group(1)[0] as transport:
        transport.all_reduce(torch.ones(3), async_op=True).wait()


def test_seed_is_fixed():
    assert torch.rand(1).item() == FIRST_DRAW and torch.get_num_threads() == 1
    torch.set_num_threads(2)


def test_seed_is_fixed_again():
    assert torch.rand(1).item() == FIRST_DRAW and torch.get_num_threads() == 1


def test_end():
    """Not a test: free what could outlive this process."""
    torch.distributed.destroy_process_group()
    for each in kept:
        if isinstance(each, subprocess.Popen):
            each.kill()
            each.wait()
        elif isinstance(each, threading.Event):
            each.set()
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
'''
GUILTY = {
    "test_thread": "thread stray",
    "test_rank_thread": "thread murmura-rank7",
    "test_open_transport": "thread murmura-world-rank0",
    "test_child": "(sleep)",
    "test_orphan": "(sleep)",
    "test_memory": "/memfd:murmura",
    "test_process_descriptor": "pidfd",
    "test_file": "file /dev/shm/murmura-police-test-",
    "test_variable": "environment variable POLICE_TEST",
    "test_changed_variable": "environment variable HOME",
    "test_port": "listening TCP port",
    "test_rendezvous": "abstract socket @murmura-police-test",
    "test_process_group": "torch's default process group",
}
INNOCENT = ("test_innocent", "test_seed_is_fixed", "test_seed_is_fixed_again")


@pytest.mark.slow
def test_every_leak_fails_its_test_and_nothing_else_does(tmp_path: Path) -> None:
    police = (Path(__file__).parent.parent / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(police.replace("GRACE_SECONDS = 2.0", "GRACE_SECONDS = 0.2"))
    (tmp_path / "test_suite.py").write_text(SUITE.replace("FIRST_DRAW", repr(torch.rand(1).item())))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-rA", "-q", "--tb=line"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {"COLUMNS": "400"}
    done = subprocess.run(
        [*command, "--rootdir", tmp_path, tmp_path], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    said: dict[str, str] = {}
    for line in done.stdout.splitlines():  # of the summary: what became of a test, its name, and why
        verdict, _, rest = line.partition(" ")
        if verdict in ("PASSED", "FAILED", "ERROR") and "::" in rest:
            name, _, why = rest.partition("::")[2].partition(" - ")
            said[name] = f"{said.get(name, '')} {verdict} {why}".strip()
    told = done.stdout + done.stderr
    for name, word in GUILTY.items():
        assert re.search(f"ERROR.*left behind: .*{re.escape(word)}", said[name]), told
    for name in INNOCENT:
        assert said[name] == "PASSED", told
