"""Launchers of several hosts, here two on one: they number ranks together, fail together and start again together."""

from __future__ import annotations

import platform
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launch.scripts import COMMAND, FAIL, ONCE, REDUCE, murmura_run, write
from launch.test_secret import ADVICE, as_threads, free_port
from murmura import ConfigError, RendezvousError
from murmura.launch.multi_host import LauncherGroup
from murmura.launch.plan import Attempt, LaunchPlan
from murmura.launch.root_cause import STOPPED_PRIORITY, Failure

Done = tuple[int, str, str]  # status, standard output, standard error


def run_nodes(words: Sequence[str], options: Sequence[Sequence[str]], **variables: str) -> list[Done]:
    """The same words on each of the hosts, with options of its own."""
    address = f"127.0.0.1:{free_port()}"
    common = ["--nnodes", str(len(options)), "--coordinator", address]
    settings = {"MURMURA_TIMEOUT": "30", **variables}
    with ThreadPoolExecutor(len(options)) as threads:
        launchers = [
            threads.submit(murmura_run, *common, "--node-rank", str(node), *own, *words, **settings)
            for node, own in enumerate(options)
        ]
    ended = [launcher.result() for launcher in launchers]
    return [(each.returncode, each.stdout, each.stderr) for each in ended]


def meet(*hosts: dict[str, Any]) -> list[Any]:
    """The attempt that the launcher of each host comes to, or what it raises."""
    address = f"127.0.0.1:{free_port()}"

    def agree(node: int, options: dict[str, Any]) -> Attempt:
        plan = {"num_ranks": 1, "num_nodes": len(hosts), "node_rank": node, "coordinator": address, "timeout": 20.0}
        return nodes.setdefault(node, LauncherGroup(LaunchPlan(command=("true",), **{**plan, **options}))).rendezvous(0)

    nodes: dict[int, LauncherGroup] = {}  # kept until all have met, for the store goes with node 0
    return as_threads(*(lambda node=node, host=host: agree(node, host) for node, host in enumerate(hosts)))


def test_ranks_are_numbered_over_unequal_hosts() -> None:
    attempts = meet({"num_ranks": 1}, {"num_ranks": 3}, {"num_ranks": 2, "secret": ""})
    assert [(each.first_rank, each.world_size) for each in attempts] == [(0, 6), (1, 6), (4, 6)]
    assert len({each.job for each in attempts}) == 1
    plan = LaunchPlan(command=("true",), num_ranks=3, num_nodes=3, node_rank=1, coordinator="10.0.0.1:29500")
    variables = attempts[1].variables(plan, 2)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    assert [variables[name] for name in names] == ["3", "6", "2", "3", "1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [({"num_nodes": 3}, "--nnodes 3, host 0 with 2"), ({"max_restarts": 2}, "--max-restarts 2, host 0 with 0")],
)
def test_hosts_that_were_told_different_things_are_refused(options: dict[str, Any], words: str) -> None:
    first, other = meet({"timeout": 2.0}, {"timeout": 2.0, **options})
    assert isinstance(other, RendezvousError)
    with pytest.raises(RendezvousError, match=rf"host 1 was started with {words}"):
        raise first


@pytest.mark.parametrize("secrets", [("swordfish", "goldfish"), ("swordfish", ""), ("", "swordfish")])
def test_a_launcher_without_the_secret_starts_nothing_and_makes_nobody_start(secrets: tuple[str, str]) -> None:
    assert all(isinstance(each, Attempt) for each in meet(*[{"secret": "swordfish"}] * 2))
    for error in meet(*({"secret": secret} for secret in secrets)):
        with pytest.raises(RendezvousError, match=ADVICE):
            raise error


def test_a_second_launcher_with_the_same_number_starts_nothing() -> None:
    plan = {"command": ("true",), "num_ranks": 1, "num_nodes": 2, "coordinator": f"127.0.0.1:{free_port()}"}
    launchers = [LauncherGroup(LaunchPlan(**plan, node_rank=node, timeout=5.0)) for node in (0, 1, 1)]
    first, *others = as_threads(*(lambda each=each: each.rendezvous(0) for each in launchers))
    late = as_threads(lambda: launchers[2].rendezvous(0))
    attempts = [each for each in others if isinstance(each, Attempt)]
    assert [each.job for each in attempts] == [first.job]
    for error in [each for each in [*others, *late] if each is not attempts[0]]:
        with pytest.raises(RendezvousError, match="host 0 has admitted another launcher as host 1"):
            raise error


def test_a_host_that_does_not_come_is_named() -> None:
    (error,) = as_threads(lambda: meet_alone())
    with pytest.raises(RendezvousError, match=r"of 2 hosts \[1\] did not come"):
        raise error


def meet_alone() -> Attempt:
    address = f"127.0.0.1:{free_port()}"
    plan = LaunchPlan(command=("true",), num_ranks=1, num_nodes=2, coordinator=address, timeout=0.3)
    return LauncherGroup(plan).rendezvous(0)


def test_a_port_that_is_taken_is_not_shared_with_another_job() -> None:
    address = f"127.0.0.1:{free_port()}"
    plan = LaunchPlan(command=("true",), num_ranks=1, num_nodes=2, coordinator=address, timeout=5.0)
    first = LauncherGroup(plan)
    with pytest.raises(ConfigError, match=r"host 0 cannot listen at .* Choose another one"):
        LauncherGroup(plan)
    del first


# While ranks are at work


def agreed(**options: Any) -> list[tuple[LauncherGroup, Attempt]]:
    """Two launchers that have agreed on an attempt."""
    address = f"127.0.0.1:{free_port()}"

    def agree(node: int) -> tuple[LauncherGroup, Attempt]:
        plan = {"num_ranks": 1, "num_nodes": 2, "node_rank": node, "coordinator": address, "timeout": 20.0}
        nodes = LauncherGroup(LaunchPlan(command=("true",), **{**plan, **options}))
        return nodes, nodes.rendezvous(0)

    return as_threads(lambda: agree(0), lambda: agree(1))


@pytest.mark.parametrize("secret", ["", "swordfish"])
def test_a_host_that_ends_early_stays_as_long_as_the_others_work(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmura.launch.multi_host.HEARTBEAT_SECONDS", 0.05)
    (first, first_attempt), (second, attempt) = agreed(timeout=0.5, secret=secret)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(first.await_root_cause, first_attempt, None)
        deadline = time.monotonic() + 1.2
        while time.monotonic() < deadline:  # more than the time-out
            assert not second.has_failure(attempt)
            assert not ended.done()
        assert second.await_root_cause(attempt, None) is None
        assert ended.result(10) is None


@pytest.mark.timed
@pytest.mark.parametrize("failure", [None, Failure(0, "here", 1, "PeerLost", 4)], ids=["working", "failed"])
def test_a_launcher_that_dies_is_missed(failure: Failure | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmura.launch.multi_host.HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr("murmura.launch.multi_host.LOST_SECONDS", 0.5 if failure is None else 60.0)
    monkeypatch.setattr("murmura.launch.multi_host.LOST_AFTER_FAILURE_SECONDS", 0.5)
    (first, first_attempt), (second, attempt) = agreed()
    assert not second.has_failure(attempt)  # its last heartbeat
    began = time.monotonic()
    if failure is None:
        while not first.has_failure(first_attempt):
            assert time.monotonic() - began < 5
    found = first.await_root_cause(first_attempt, failure)
    assert time.monotonic() - began < 3
    assert found is not None
    assert (found.rank, found.exit_status) == (None, 1)
    assert str(found).startswith(f"the launcher on host 1 ({platform.node()}) is gone:\nIt has sent no heartbeat for ")
    assert second.has_failure(attempt)  # so says node 0, if it was only asleep


class Stoppable:
    """`store`, whose answers wait while it is stopped."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.goes_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        assert self.goes_on.wait(30.0)
        return getattr(self._store, name)


@pytest.mark.timed
@pytest.mark.parametrize("failure", [None, Failure(0, "here", 1, "ValueError", 1)], ids=["working", "failed"])
def test_a_host_0_whose_store_is_silent_is_missed(failure: Failure | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmura.launch.multi_host.HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr("murmura.launch.multi_host.LOST_SECONDS", 0.5)
    monkeypatch.setattr("murmura.transports.bounded_store.ANSWER_SECONDS", 0.2)
    (_first, _), (second, attempt) = agreed()
    assert not second.has_failure(attempt)
    stopped = second._store._inner = Stoppable(second._store._inner)
    try:
        began = time.monotonic()
        if failure is None:
            while not second.has_failure(attempt):
                assert time.monotonic() - began < 5
        found = second.await_root_cause(attempt, failure)
        assert time.monotonic() - began < 5
        if failure is None:
            assert str(found).startswith(
                f"the launcher on host 0 ({platform.node()}) is gone:\nIt has not answered for "
            )
        else:
            assert found is failure
    finally:
        stopped.goes_on.set()


@pytest.mark.timed
def test_hosts_learn_why_ranks_were_stopped_when_the_store_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmura.launch.multi_host.HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr("murmura.launch.multi_host.LOST_SECONDS", 0.5)
    monkeypatch.setattr("murmura.transports.bounded_store.ANSWER_SECONDS", 0.2)
    (first, first_attempt), (second, attempt) = agreed()
    stopped = second._store._inner = Stoppable(second._store._inner)
    began = time.monotonic()
    while not second.has_failure(attempt):
        assert time.monotonic() - began < 5
    stopped.goes_on.set()
    with ThreadPoolExecutor(1) as pool:
        ranks = Failure(None, "there", 1, "It stopped its ranks.", STOPPED_PRIORITY)
        ended = pool.submit(second.await_root_cause, attempt, ranks)
        found = first.await_root_cause(first_attempt, None)
        assert ended.result(10) == found
    assert str(found).startswith(f"the launcher on host 0 ({platform.node()}) is gone:\nIt has not answered for ")


def test_a_store_that_is_slow_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("murmura.launch.multi_host.HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr("murmura.transports.bounded_store.ANSWER_SECONDS", 0.05)
    (first, first_attempt), (second, attempt) = agreed()
    stopped = second._store._inner = Stoppable(second._store._inner)
    assert not second.has_failure(attempt)
    assert second._store.is_silent
    stopped.goes_on.set()
    failure = Failure(1, "there", 1, "ValueError", 1)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(second.await_root_cause, attempt, failure)
        assert first.await_root_cause(first_attempt, None) == failure
        assert ended.result(10) == failure


@pytest.mark.timed
def test_a_host_0_that_is_not_there_is_missed_at_the_deadline(capfd: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    plan = LaunchPlan(command=("true",), num_ranks=1, num_nodes=2, node_rank=1, coordinator=address, timeout=2.0)
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=rf"host 1 did not reach .* host 0 at {address} within 2.0 s"):
        LauncherGroup(plan)
    assert time.monotonic() - began < 2.0 * 1.1 + 1.0
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_when_a_launcher_is_killed_the_other_host_ends_soon(dead: int, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    line = [*COMMAND, "-n", "1", "--nnodes", "2", "--coordinator", address]
    script = write(tmp_path, REDUCE)
    launchers = [
        subprocess.Popen([*line, "--node-rank", str(node), script], stdout=subprocess.PIPE, text=True)
        for node in range(2)
    ]
    try:
        assert [launcher.stdout and launcher.stdout.readline() for launcher in launchers] == [
            f"[rank {rank}] at work\n" for rank in range(2)
        ]
        began = time.monotonic()
        launchers[dead].kill()
        assert launchers[1 - dead].wait(40) == 1
        assert time.monotonic() - began < 10
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.communicate()


def test_a_failure_on_one_host_ends_the_other_and_is_shown_on_both(tmp_path: Path) -> None:
    done = run_nodes([write(tmp_path, FAIL), "raise", "1"], [["-n", "1"], ["-n", "1"]])
    for status, _, errors in done:
        assert status == 1
        last = errors.rpartition("murmura run: ")[2]
        assert last.startswith("rank 1 on ")
        assert last.endswith("ValueError: no good\n")


def test_all_hosts_start_again_together(tmp_path: Path) -> None:
    done = run_nodes([write(tmp_path, ONCE)], [["-n", "1", "--max-restarts", "1"]] * 2)
    assert [status for status, _, _ in done] == [0, 0]
    jobs = [[line.split()[-1] for line in output.splitlines() if "job" in line] for _, output, _ in done]
    assert jobs[0] == jobs[1]
    assert len(set(jobs[0])) == 2
