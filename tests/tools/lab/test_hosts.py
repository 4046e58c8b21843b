"""Simulated hosts are hosts of their own, with shaped links, and are gone afterwards, whatever happened."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from murmura import ConfigError, PeerLost, PeerTimeout, UsageError
from murmura.tools.lab import Hosts, namespaces, persistent
from murmura.transports.host import host_identity
from tools.lab.conditions import needs_namespaces
from worlds import SECONDS

IDENTITY = "import os; print(os.stat('/proc/self/ns/net').st_ino)"
SAY_PLACE = "import os; print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')))"
LISTEN = """
import socket
with socket.create_server(("", 5000)) as door:
    print("ready", flush=True)
    with door.accept()[0] as caller:
        print(sum(len(part) for part in iter(lambda: caller.recv(65536), b"")))
"""
CALL = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=10) as server:
    server.sendall(bytes(int(sys.argv[2])))
"""
FORKS = multiprocessing.get_context("forkserver")  # whose server has imported torch: a process starts at once
STAY = "import signal; print('here', flush=True); signal.pause()"


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    assert not [lab for lab in namespaces.labs() if lab.startswith(f"murmura-{os.getpid()}-")]


def python(*words: str) -> list[str]:
    return [sys.executable, "-c", *words]


@pytest.mark.parametrize("tool", ["ip", "tc"])
def test_without_iproute2_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else f"/usr/sbin/{name}")
    with pytest.raises(UsageError, match=rf"need {tool}, .* Install iproute2"):
        Hosts(2)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match=r"needs root\. Run it with sudo"):
        Hosts(2)


@pytest.mark.parametrize(("n", "rate"), [(0, None), (251, None), (2, "fast"), (2, "0mbit")])
def test_what_cannot_be_built_is_refused(n: int, rate: str | None) -> None:
    with pytest.raises(ConfigError):
        Hosts(n, rate)


@needs_namespaces
def test_each_host_is_one_by_itself_and_sees_only_the_others() -> None:
    with Hosts(3) as hosts:
        identities = hosts.run(python(IDENTITY), capture=True)
        assert len({*identities, host_identity().rpartition(":")[2]}) == 4
        routes = hosts.run(["ip", "-json", "route"], capture=True)
        assert [[route["dst"] for route in json.loads(each)] for each in routes] == [["10.213.77.0/24"]] * 3
        assert len({host.address for host in hosts}) == len(hosts) == 3


@needs_namespaces
def test_ranks_are_numbered_host_by_host() -> None:
    with Hosts(2) as hosts:
        said = hosts.run(python(SAY_PLACE), ranks_per_host=2, capture=True)
    assert [line.split() for line in said] == [[str(rank), "4", str(rank % 2), "2"] for rank in range(4)]


@needs_namespaces
def test_links_are_shaped_both_ways_and_count_what_they_carry() -> None:
    num_bytes = 2_000_000
    with Hosts(2, rate="1gbit") as hosts:
        assert shaped(hosts) == [125_000_000] * 4
        before = [host.counters() for host in hosts]
        with subprocess.Popen(hosts[1].command(python(LISTEN)), stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            subprocess.run(hosts[0].command(python(CALL, hosts[1].address, str(num_bytes))), check=True, timeout=20)
            assert int(server.stdout.read()) == num_bytes
        sent, received = (host.counters() - earlier for host, earlier in zip(hosts, before, strict=True))
    assert num_bytes < sent.tx_bytes < 1.06 * num_bytes
    assert num_bytes < received.rx_bytes < 1.06 * num_bytes
    assert sent.rx_bytes < 0.1 * num_bytes


@needs_namespaces
def test_links_take_another_rate_in_both_directions() -> None:
    with Hosts(2) as hosts:
        assert hosts.rate is None
        for rate, bytes_per_second in (("1gbit", 125_000_000), ("100mbit", 12_500_000)):
            hosts.shape(rate)
            assert (hosts.rate, shaped(hosts)) == (rate, [bytes_per_second] * 4)
        with pytest.raises(ConfigError, match="write bits per second"):
            hosts.shape("fast")
        assert (hosts.rate, shaped(hosts)) == ("100mbit", [12_500_000] * 4)


def shaped(hosts: Hosts) -> list[int]:
    """Bytes per second that each link takes from its host, and brings to it."""
    switch = hosts[0].namespace.replace("-h0", "-switch")
    ends = [end for host in hosts for end in ((host.namespace, "eth0"), (switch, f"h{host.index}"))]
    shown = [
        subprocess.check_output(["tc", "-n", name, "-json", "qdisc", "show", "dev", device]) for name, device in ends
    ]
    return [json.loads(each)[0]["options"]["rate"] for each in shown]


@needs_namespaces
def test_a_rank_that_fails_is_named_and_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmura.launch.supervisor.GRACE_SECONDS", 0.2)
    fail = "import os, signal, sys\nif os.environ['RANK'] == '1': sys.exit('no luck')\nsignal.pause()"
    with Hosts(2) as hosts, pytest.raises(PeerLost, match=r"rank 1 on host 1 exited with status 1:\nno luck"):
        hosts.run(python(fail), capture=True, timeout=30)


@needs_namespaces
def test_ranks_that_do_not_end_are_ended_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmura.launch.supervisor.GRACE_SECONDS", 0.2)
    with Hosts(2) as hosts, pytest.raises(PeerTimeout, match="ranks 0 and 1 of the lab had not ended"):
        hosts.run(python("import signal; signal.pause()"), timeout=0.5)


@needs_namespaces
def test_closing_ends_what_runs_on_the_hosts() -> None:
    hosts = Hosts(1)
    with subprocess.Popen(hosts[0].command(python(STAY)), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        hosts.close()
        assert process.wait(5) == -signal.SIGTERM
    hosts.close()


def own_a_host(answers: Connection) -> None:
    """Make a host, run something on it, and wait to be killed."""
    hosts = Hosts(1)
    child = subprocess.Popen(hosts[0].command(python(STAY)), stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    answers.send((hosts[0].namespace, child.pid))
    answers.recv()


@needs_namespaces
def test_what_a_killed_owner_left_goes_with_the_next_lab_and_a_living_owner_keeps_his() -> None:
    here, there = FORKS.Pipe()
    owner = FORKS.Process(target=own_a_host, args=(there,))
    owner.start()
    with Hosts(1) as living, here, there:
        assert here.poll(SECONDS)
        namespace, pid = here.recv()
        child = os.pidfd_open(pid)
        with Hosts(1):
            assert namespace in {name for names in namespaces.labs().values() for name in names}
        owner.kill()
        owner.join(SECONDS)
        with Hosts(1):
            left = {name for names in namespaces.labs().values() for name in names}
            assert namespace not in left
            assert living[0].namespace in left
        assert select.select([child], [], [], 0)[0], "what ran in the namespace still does"
        os.close(child)


@needs_namespaces
@pytest.mark.usefixtures("turn_with_the_standing_lab")
def test_a_standing_lab_outlives_its_maker_until_it_is_taken_down() -> None:
    maker = FORKS.Process(target=persistent.up, args=(2, "100mbit"))
    maker.start()
    maker.join(SECONDS)
    assert maker.exitcode == 0
    with Hosts(1):  # it is not among the leftovers that this one removes
        found = persistent.find()
    assert found.hosts[1].namespace.startswith(f"murmura-{maker.pid}-")
    assert found.rate == "100mbit"
    with pytest.raises(UsageError, match=r"a lab of 2 hosts, 100mbit is up already.* murmura lab down"):
        persistent.up(3)
    assert persistent.down() == found
    assert persistent.down() is None
    with pytest.raises(UsageError, match="no lab is up"):
        persistent.find()
