"""`murmura doctor`: each rule on invented facts, each reader on an invented system, the command on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from murmura import PeerLost, run_world
from murmura.tools.cli import doctor
from murmura.tools.cli.main import app
from murmura.tools.doctor import accelerators as gpu
from murmura.tools.doctor import leftovers as left
from murmura.tools.doctor import live_probes as live
from murmura.tools.doctor import memory, network, processor, shared_memory, software
from murmura.tools.doctor.cgroups import Limits, read_limits
from murmura.tools.doctor.checks import check_section
from murmura.tools.doctor.findings import Diagnosis, Finding, Section, Status
from murmura.tools.doctor.interfaces import Interface, Scope, read_interfaces, scope_of
from murmura.tools.doctor.network import Resolved
from murmura.tools.doctor.with_timeout import call_with_timeout, one_line

GIB = 2**30
LO = Interface("lo", ("127.0.0.1", "::1"), is_loopback=True)
LAN = Interface("eth0", ("10.0.0.2",))
WAN = Interface("ens5", ("8.8.4.4",))
HOME = Resolved("127.0.1.1", True)

SOFTWARE = software.SoftwareFacts(
    system="Linux", release="6.1", machine="x86_64", python="3.12.3", murmura="0.1.0", torch="2.13.0+cpu",
    torch_build="CPU", numpy="2.4.0", numpy_fault="", world="rank 0 of a world of 1", world_fault="",
)  # fmt: skip
PROCESSOR = processor.ProcessorFacts(cores=8, usable=8, torch_threads=8)
MEMORY = memory.MemoryFacts(total_bytes=32 * GIB, available_bytes=20 * GIB)
SHARED = shared_memory.SharedMemoryFacts(supported=True, total_bytes=32 * GIB, open_files=1024, dev_shm_bytes=16 * GIB)
NETWORK = network.NetworkFacts(interfaces=(LAN, LO), host_name="node1", resolved=(Resolved("10.0.0.2", True),))
GPUS = gpu.AcceleratorFacts(
    torch_build="CUDA 12.8", gpus=("H200 (140 GiB)",) * 2, nccl="2.27.3", interfaces=(LAN, LO), has_driver=True
)


def net(**changes: Any) -> network.NetworkFacts:
    return replace(NETWORK, **changes)


ORPHAN = left.Process(42, "python train.py", 1, "systemd")
TRIALS = [live.Trial((), (1e-4, 1e-3))] * 2


@pytest.mark.parametrize(
    ("check", "facts"),
    [
        (software.check, SOFTWARE),
        (processor.check, PROCESSOR),
        (processor.check, replace(PROCESSOR, quota=8.0, omp_num_threads="8,1")),
        (memory.check, MEMORY),
        (memory.check, replace(MEMORY, limit_bytes=64 * GIB)),
        (shared_memory.check, SHARED),
        (shared_memory.check, replace(SHARED, open_files=None, dev_shm_bytes=None)),
        (network.check, NETWORK),
        (network.check, net(resolved=(HOME,), gloo_interfaces=("eth0",))),
        (gpu.check, GPUS),
        (gpu.check, gpu.AcceleratorFacts(torch_build="CPU")),
        (left.check, left.LeftoverFacts()),
        (left.check, left.LeftoverFacts(processes=(left.Process(9, "python", 7, "python3"),))),
    ],
)
def test_a_healthy_machine_needs_no_advice(check: Callable[[Any], list[Finding]], facts: object) -> None:
    assert {finding.status for finding in check(facts)} == {Status.OK}


@pytest.mark.parametrize(
    ("check", "facts", "status", "title", "advice"),
    [
        (software.check, replace(SOFTWARE, torch="2.5.1+cpu"), "broken", "2.5.1+cpu is too old", "upgrade torch"),
        (software.check, replace(SOFTWARE, torch="nightly"), "broken", "nightly is too old", "2.6"),
        (software.check, replace(SOFTWARE, system="Darwin"), "note", "only a part of its work on Darwin", "Linux"),
        (software.check, replace(SOFTWARE, numpy_fault="Numpy is not available"), "broken", "numpy 2.4.0", "pip"),
        (software.check, replace(SOFTWARE, world_fault="Missing: RANK"), "broken", "make no sense", "Unset"),
        (processor.check, replace(PROCESSOR, quota=2.5), "warning", "the time of only 2.5 cores", "taskset -c 0-1"),
        (processor.check, replace(PROCESSOR, usable=4, torch_threads=4), "note", "4 of 8 cores", "taskset -c 0-7"),
        (processor.check, processor.ProcessorFacts(cores=1, usable=1), "note", "1 core", "trying things out"),
        (processor.check, replace(PROCESSOR, torch_threads=16), "warning", "16 threads on 8 cores", "at most 8"),
        (processor.check, replace(PROCESSOR, torch_threads=1, omp_num_threads="1"), "note", "1 thread on 8", "ranks"),
        (processor.check, replace(PROCESSOR, omp_num_threads="500m"), "warning", "OMP_NUM_THREADS=500m", "unset"),
        (processor.check, replace(PROCESSOR, omp_num_threads="0"), "warning", "no number of threads", "unset"),
        (memory.check, replace(MEMORY, available_bytes=GIB // 2), "warning", "only 0.5 GiB", "fewer ranks"),
        (memory.check, replace(MEMORY, limit_bytes=8 * GIB), "note", "allows 8.0 GiB", "docker run --memory"),
        (memory.check, replace(MEMORY, limit_bytes=GIB // 2), "warning", "allows 0.5 GiB", "raise it"),
        (shared_memory.check, replace(SHARED, supported=False), "note", "not available on this", "kind='threads'"),
        (shared_memory.check, replace(SHARED, faults={"pidfd": "no"}), "broken", "no pidfd", "seccomp"),
        (shared_memory.check, replace(SHARED, address_space_bytes=48 * GIB), "broken", "too little", "ulimit -v"),
        (shared_memory.check, replace(SHARED, address_space_bytes=200 * GIB), "warning", "6 ranks", "ulimit -v"),
        (shared_memory.check, replace(SHARED, open_files=64), "warning", "only 64 open files", "ulimit -n"),
        (shared_memory.check, replace(SHARED, dev_shm_bytes=64 * 2**20), "note", "only 64 MiB", "--shm-size"),
        (network.check, net(resolved=(HOME,)), "warning", "to loopback", "GLOO_SOCKET_IFNAME=eth0"),
        (network.check, net(resolved=(HOME,)), "warning", "to loopback", "node1 the address 10.0.0.2"),
        (network.check, net(resolved=(), resolve_fault="gaierror"), "warning", "not resolve", "=eth0"),
        (network.check, net(resolved=(Resolved("10.9.9.9", False),)), "warning", "another", "=eth0"),
        (network.check, net(interfaces=(LO,), resolved=(HOME,)), "note", "to loopback", "that the others"),
        (network.check, net(interfaces=(LO,), resolved=(HOME,)), "note", "no interface", "bring a network"),
        (network.check, net(interfaces=(replace(LO, is_up=False), LAN)), "broken", "loopback is", "ip link"),
        (network.check, net(gloo_interfaces=("eth7",)), "broken", "no interface", "IFNAME=eth0, or unset"),
        (network.check, net(gloo_interfaces=("lo",)), "warning", "does not lead", "IFNAME=eth0"),
        (network.check, net(interfaces=(WAN, LO, LAN), gloo_interfaces=("ens5",)), "warning", "public", "IFNAME=eth0"),
        (network.check, net(interfaces=(WAN,), resolved=(Resolved("8.8.4.4", True),)), "warning",
         "public", "VPN"),
        (gpu.check, gpu.AcceleratorFacts(torch_build="CPU", has_driver=True), "warning", "cannot use", "for CUDA"),
        (gpu.check, gpu.AcceleratorFacts(torch_build="CUDA 12.8", fault="old"), "warning", "cannot use", "nvidia-smi"),
        (gpu.check, replace(GPUS, gpus=("H200",)), "note", "for one rank", "shared memory"),
        (gpu.check, replace(GPUS, nccl=""), "note", "no NCCL", "Linux"),
        (left.check, left.LeftoverFacts(processes=(ORPHAN,)), "warning", "orphan processes: 42", "kill 42"),
        (left.check, left.LeftoverFacts(rendezvous_sockets=(left.RendezvousSocket("@m", 7),)), "note",
         "sockets: 1", "kill 7"),
        (left.check, left.LeftoverFacts(rendezvous_sockets=(left.RendezvousSocket("@m", None),)), "note",
         "sockets: 1", "user"),
        (left.check, left.LeftoverFacts(folders=(left.Folder("/t/murmura-x", 7200.0),)), "note", "folders: 1",
         "rm -r /t/murmura-x"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_advice(
    check: Callable[[Any], list[Finding]], facts: object, status: str, title: str, advice: str
) -> None:
    found = [finding for finding in check(facts) if title in finding.title]
    assert [finding.status for finding in found] == [status]
    assert advice in found[0].advice


def test_an_orphan_is_told_from_a_child_of_process_1() -> None:
    assert ORPHAN.is_orphan
    assert replace(ORPHAN, parent_name="sleep").is_orphan  # process 1 of a container
    assert replace(ORPHAN, parent_pid=900).is_orphan  # a user's systemd
    assert not replace(ORPHAN, parent_name="python3").is_orphan
    assert not replace(ORPHAN, parent_pid=900, parent_name="bash").is_orphan


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        ("127.0.1.1", Scope.LOOPBACK), ("::1", Scope.LOOPBACK), ("fe80::1%eth0", Scope.LINK_LOCAL),
        ("192.168.1.9", Scope.PRIVATE), ("100.64.0.7", Scope.PRIVATE), ("fd00::2", Scope.PRIVATE),
        ("8.8.4.4", Scope.PUBLIC), ("2a00:1450::1", Scope.PUBLIC),
    ],
)  # fmt: skip
def test_scopes(address: str, scope: Scope) -> None:
    assert scope_of(address) is scope


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, Limits()),
        ({"proc/self/cgroup": "0::/a/b", "sys/cgroup.controllers": "", "sys/a/cpu.max": "150000 100000\n",
          "sys/a/b/cpu.max": "max 100000\n", "sys/a/b/memory.max": "1024\n", "sys/a/memory.max": "max\n"},
         Limits(1.5, 1024)),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/host/path\n3:memory:/j\n0::/", "sys/cpu/cpu.cfs_quota_us": "50000",
          "sys/cpu/cpu.cfs_period_us": "100000", "sys/memory/memory.limit_in_bytes": "9223372036854771712",
          "sys/memory/j/memory.limit_in_bytes": "4096", "sys/unified/memory.max": "max"}, Limits(0.5, 4096)),
        ({"proc/self/cgroup": "4:cpu:/", "sys/cpu/cpu.cfs_quota_us": "-1", "sys/cpu/cpu.cfs_period_us": "100000"},
         Limits()),
    ],
)  # fmt: skip
def test_limits_of_control_groups_are_read(tmp_path: Path, files: dict[str, str], limits: Limits) -> None:
    plant(tmp_path, files)
    assert read_limits(tmp_path / "proc", tmp_path / "sys") == limits


def test_interfaces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docker0" / "bridge").mkdir(parents=True)
    flags = {"wlan0": "up,broadcast", "lo": "up,loopback,running", "eth0": "up,running", "docker0": "up,running"}
    stats = {name: SimpleNamespace(isup="running" in each, flags=each) for name, each in flags.items()}
    addresses = {
        "lo": [(socket.AF_INET, "127.0.0.1")],
        "eth0": [(socket.AF_INET6, "fe80::1%eth0"), (socket.AF_INET, "10.0.0.2"), (socket.AF_PACKET, "02:fc::01")],
        "docker0": [(socket.AF_INET, "172.17.0.1")],
    }
    told = {name: [SimpleNamespace(family=f, address=a) for f, a in each] for name, each in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: told)
    found = read_interfaces(tmp_path)
    assert found == (
        Interface("docker0", ("172.17.0.1",), is_bridge=True),
        Interface("eth0", ("10.0.0.2", "fe80::1")),
        Interface("lo", ("127.0.0.1",), is_loopback=True),
        Interface("wlan0", is_up=False),
    )
    assert [each.name for each in network.reachable(found)] == ["eth0"]


def test_the_resolver_is_asked_and_its_answer_tried() -> None:
    facts = network.gather("eth0, eth1", resolve=lambda name: ["127.0.0.1", "192.0.2.77"])
    assert facts.resolved == (Resolved("127.0.0.1", True), Resolved("192.0.2.77", False))
    assert facts.gloo_interfaces == ("eth0", "eth1")
    assert any(each.is_loopback and "127.0.0.1" in each.addresses for each in facts.interfaces)


def test_leftovers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left, "SETTLE_SECONDS", 0.0)
    server = "python\0-c\0from multiprocessing.forkserver import main; main(5, 6, ['torch', 'murmura'])\0"
    header = "Num RefCount Protocol Flags Type St Inode Path\n"
    rest = "0 " * 48  # of the fields in stat
    proc = plant(
        tmp_path / "proc",
        {
            "stat": "btime 0\n", "1/stat": f"1 (systemd) S 0 {rest}",
            "50/cmdline": server, "50/stat": f"50 (a ) b) S 1 {rest}", "50/maps": "",
            "51/cmdline": "python\0train.py\0", "51/stat": f"51 (python) S 50 {rest}", "51/maps": "7f0 /memfd:murmura",
            "52/cmdline": "bash\0", "52/stat": f"52 (bash) S 1 {rest}", "52/maps": "7f00 /bin/bash",
            "53/cmdline": "", "53/stat": f"53 (kthread) S 2 {rest}",
            "net/unix": header + "0: 2 0 10000 5 1 777 @murmura-ab\n0: 3 0 0 5 3 778 @murmura-ab\n0: 2 0 0 1 1 5 /x\n",
        },
    )  # fmt: skip
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
    (proc / "51" / "fd").mkdir()
    (proc / "51" / "fd" / "3").symlink_to("socket:[777]")
    temp = plant(tmp_path / "temp", {"murmura-old/store": "", "murmura-busy/store": "", "murmura-file": ""})
    for path in ("murmura-old/store", "murmura-old", "murmura-busy", "murmura-file"):
        os.utime(temp / path, (1000.0, 1000.0))
    os.utime(temp / "murmura-busy" / "store", (8000.0, 8000.0))
    facts = left.gather(proc, temp, now=9000.0)
    assert [(each.pid, each.is_orphan) for each in facts.processes] == [(50, True), (51, False)]
    assert facts.rendezvous_sockets == (left.RendezvousSocket("@murmura-ab", 51),)
    assert facts.folders == (left.Folder(str(temp / "murmura-old"), 8000.0),)


def test_what_goes_away_by_itself_is_no_leftover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left, "LOOK_SECONDS", 0.0)
    looks = iter([[ORPHAN, replace(ORPHAN, pid=43, parent_pid=7, parent_name="bash")], [ORPHAN], []])
    assert left._lasting(lambda: next(looks), lambda process: process.is_orphan) == ()


def test_half_of_a_launchers_variables_is_a_fault() -> None:
    assert software.gather({}).world == "rank 0 of a world of 1"
    assert "WORLD_SIZE" in software.gather({"RANK": "1"}).world_fault


def test_an_attempt_answers_in_any_case() -> None:
    event = threading.Event()
    assert call_with_timeout(lambda: 7, 5.0).value == 7
    failed = call_with_timeout(lambda: 1 // 0, 5.0)
    assert isinstance(failed.fault, ZeroDivisionError)
    assert isinstance(call_with_timeout(event.wait, 0.01).fault, TimeoutError)
    event.set()
    assert one_line(ValueError("a\n  b" + "c" * 500), 20) == "ValueError: a bccccc ..."


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [("eth", "eth0 eth1"), ("=eth0", "eth0"), ("^eth", "lo ib0"), ("^=eth0,lo", "eth1 ib0"), ("ib,lo", "lo ib0")],
)
def test_nccl_socket_ifname_is_read_as_nccl_does(setting: str, allowed: str) -> None:
    assert [name for name in ("lo", "eth0", "eth1", "ib0") if gpu.matches(setting, name)] == sorted(
        allowed.split(), key=["lo", "eth0", "eth1", "ib0"].index
    )


def test_what_nccl_needs_is_judged() -> None:
    up, down = Interface("eth0", ("10.0.0.1",)), Interface("ib0", ("10.1.0.1",), is_up=False)
    loopback = Interface("lo", ("127.0.0.1",), is_loopback=True)

    def judged(**changes: Any) -> tuple[Status, str]:
        found = gpu.check(replace(GPUS, **changes))[-1]
        return found.status, found.detail

    assert judged(interfaces=(loopback, up, down)) == (Status.OK, "it chooses among eth0")
    assert judged(interfaces=(loopback, down))[0] is Status.NOTE
    assert judged(interfaces=(loopback, up, down), chosen="eth")[0] is Status.OK
    assert judged(interfaces=(loopback, up, down), chosen="ib0")[0] is Status.BROKEN
    assert gpu.check(replace(GPUS, nccl="2.8.4"))[1].status is Status.WARNING


def test_a_section_that_fails_is_a_finding() -> None:
    found = check_section(Section.NETWORK, lambda: [][1])
    assert [(each.section, each.status) for each in found] == [(Section.NETWORK, Status.WARNING)]
    assert "IndexError" in found[0].detail


def test_every_rank_finds_its_sums_right() -> None:
    trials = run_world(live.exercise, 3, False)
    assert [trial.wrong for trial in trials] == [(), (), ()]
    assert all(len(trial.seconds) == len(live.LENGTHS) for trial in trials)


def test_a_wrong_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: len(a) < 5000 and equal(a, b))
    assert run_world(live.exercise, 2, False)[0].wrong == (live.LENGTHS[1],)


def test_trials_are_judged() -> None:
    assert live.check(live.GLOO, TRIALS, 1.0).status is Status.OK
    wrong = live.check(live.GLOO, [TRIALS[0], live.Trial((1024,), (1e-4, 1e-3))], 1.0)
    assert (wrong.status, "rank 1: [1024]" in wrong.detail) == (Status.BROKEN, True)
    assert live.check(live.GLOO, [TRIALS[0], live.Trial((), (0.5, 0.5))], 1.0).status is Status.WARNING


def test_the_worlds_that_can_run_here_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmura.tools.doctor.live_probes.futex.is_supported", lambda: True)
    assert live.choose(0, False) == [live.THREADS, live.SHARED_MEMORY, live.GLOO]
    assert live.choose(4, True)[-1].num_ranks == 4
    assert (live.choose(1, True)[-1].num_ranks, live.choose(1, True)[-1].kind) == (2, live.ONE_GPU)
    assert live.choose(4, False) == live.choose(0, False)
    monkeypatch.setattr("murmura.tools.doctor.live_probes.futex.is_supported", lambda: False)
    assert live.choose(0, False) == [live.THREADS, live.GLOO]


def test_a_world_that_fails_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> list[live.Trial]:
        os.write(2, b"gloo: cannot connect\n\n")
        raise PeerLost("rank 1 was killed by SIGSEGV.")

    monkeypatch.setattr(live, "run_world", fail)
    titles: list[str] = []
    found = live.run([live.THREADS, live.GLOO], titles.append)
    assert titles == ["threads", "processes over Gloo"]
    assert [each.status for each in found] == [Status.BROKEN, Status.BROKEN]
    assert found[1].detail == "PeerLost: rank 1 was killed by SIGSEGV. Its last words: gloo: cannot connect"
    event = threading.Event()
    monkeypatch.setattr(live, "run_world", lambda *args, **options: event.wait())
    monkeypatch.setattr(live, "GRACE_SECONDS", 0.01)
    assert "no answer" in live.try_out(replace(live.THREADS, timeout=0.01), 0.0, str).detail
    event.set()


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


SICK = Diagnosis(
    (
        Finding(Section.MEMORY, Status.OK, "lots", "of memory"),
        Finding(Section.NETWORK, Status.NOTE, "quiet", "no network", "Plug it in."),
        Finding(Section.LIVE, Status.BROKEN, "gloo: failed", "no\nway", "Try again."),
    )
)


def test_what_is_broken_sets_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "run_checks", lambda *args, **options: SICK)
    status, text = run()
    assert status == 1
    assert text.splitlines() == [
        "memory", "  ok       lots: of memory",
        "network", "  note     quiet: no network", "           -> Plug it in.",
        "live", "  broken   gloo: failed: no way", "           -> Try again.",
        "1 thing is broken; 1 note.",
    ]  # fmt: skip
    status, text = run("--json", "-")
    assert (status, json.loads(text)["status"]) == (1, "broken")
    monkeypatch.setattr(doctor, "run_checks", lambda *args, **options: Diagnosis(SICK.findings[:2]))
    assert run()[0] == 0


def test_a_terminal_gets_marks() -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=60, record=True, file=nowhere)
        console.print(doctor.table_of(SICK))
        marks = [line.rstrip() for line in console.export_text().splitlines()]
        console.print(doctor.table_of(SICK, ascii_only=True))
        assert console.export_text().isascii()
    assert marks[1] == "✓ lots  of memory"
    assert "✗ gloo: failed  no" in marks
    assert marks[-1] == "  → Try again."


def test_settings_of_other_libraries_are_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    status, text = run("--no-live")
    assert status == 1
    assert "GLOO_SOCKET_IFNAME=nowhere0 names no interface" in text
    assert "OMP_NUM_THREADS=many is no number" in text
    assert "not tried" in text


def await_end_of_group(pid: int, seconds: float = 10.0) -> None:
    """multiprocessing's server ends by itself when its process has, and takes its time where others are busy."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(pid, 0)
            time.sleep(0.02)


def test_this_machine_is_fit_and_nothing_but_json_is_printed() -> None:
    command = [sys.executable, "-m", "murmura", "doctor", "--json", "-"]
    with tempfile.TemporaryDirectory(prefix="m-") as temp:  # a short name, for sockets are made in it
        variables = {**os.environ, "TMPDIR": temp}
        with subprocess.Popen(
            command, stdout=PIPE, stderr=PIPE, text=True, env=variables, start_new_session=True
        ) as done:
            out, error = done.communicate()
        await_end_of_group(done.pid)
        assert list(Path(temp).glob("murmura-*")) == []
    assert done.returncode == 0, out + error
    told = json.loads(out)
    assert {each["section"] for each in told["findings"]} == set(Section)
    assert {each["status"] for each in told["findings"]} <= set(Status) - {"broken"}
    assert all(bool(each["advice"]) == (each["status"] != "ok") for each in told["findings"])
    assert len([each for each in told["findings"] if each["section"] == "live"]) >= 3
    assert "Traceback" not in error
