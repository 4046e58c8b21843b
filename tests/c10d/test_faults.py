"""A rank is killed, stopped, raises, or calls something else: the others name it, in time, as murmura's own errors."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from murmura import CollectiveMismatch, PeerLost, PeerTimeout
from murmura.transports import rendezvous

DEATH_SECONDS = 2.0
STOP_SECONDS = 2.0  # the deadline of the group where a rank is stopped
CULPRIT = 1
LARGE = 2 * 10**6  # elements, of which peers read tensors where they lie if they see them often
NUM_SENT = 40  # so many large tensors are more than a sender buffers


@dataclass
class Report:
    rank: int
    kind: str  # the name of the error's class
    message: str
    peer: int | None
    when: float  # time.monotonic(), which processes of a host share
    is_torchs: bool


def call(way: str, length: int, state: dict[str, Any]) -> None:
    tensor = torch.ones(length)
    if way == "sync":
        dist.all_reduce(tensor)
    elif way == "async":
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
    elif way == "future":
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.get_future().wait()
    elif way == "gather":
        dist.all_gather_into_tensor(torch.empty(dist.get_world_size() * length), tensor)
    elif way == "scatter":
        dist.reduce_scatter_tensor(tensor, torch.ones(dist.get_world_size() * length))
    elif way == "recv":
        if dist.get_rank() == CULPRIT:
            for peer in range(dist.get_world_size()):
                if peer != CULPRIT:
                    dist.send(tensor, peer)
        else:
            dist.recv(tensor, CULPRIT)
    elif way == "send":
        for _ in range(NUM_SENT):
            if dist.get_rank() == CULPRIT:
                for peer in range(dist.get_world_size()):
                    if peer != CULPRIT:
                        dist.recv(tensor, peer)
            else:
                dist.send(tensor, CULPRIT)
    elif way == "broadcast":
        dist.broadcast(tensor, CULPRIT)
    elif way == "barrier":
        dist.barrier()
    elif way == "monitored":
        group: Any = dist.group.WORLD
        group.monitored_barrier(timedelta(seconds=30))
    elif way == "new_group":
        dist.new_group()
    elif way == "ddp":
        module = state.setdefault("module", nn.parallel.DistributedDataParallel(nn.Linear(4, 4)))
        module(torch.ones(2, 4)).sum().backward()


def misbehave(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "raise":
        raise ValueError("no such batch")
    elif fault == "other shape":
        dist.all_reduce(torch.ones(5))
    elif fault == "other call":
        dist.broadcast(torch.ones(3), 0)


def rank_main(
    rank: int,
    size: int,
    path: str,
    reports: Any,
    hosts: Sequence[int] | None,
    way: str,
    length: int,
    fault: str,
    timeout: float,
) -> None:
    if hosts is not None:
        rendezvous.host_identity = lambda: f"host {hosts[rank]}"
    torch.set_num_threads(1)
    import warnings

    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=timeout)}
    dist.init_process_group("murmura", init_method=f"file://{path}", **options)
    state: dict[str, Any] = {}
    try:
        for _ in range(3):
            call(way, length, state)
        if rank == CULPRIT:
            reports.send(("fault", time.monotonic()))
            misbehave(fault)
        call(way, length, state)
        reports.send(Report(rank, "", "", None, time.monotonic(), False))
    except Exception as error:
        ours = next((each for each in (PeerLost, PeerTimeout, CollectiveMismatch) if isinstance(error, each)), None)
        kind = ours.__name__ if ours else type(error).__name__
        told = Report(
            rank,
            kind,
            str(error)[:2000],  # so that a report is written to the pipe at once, whoever writes beside it
            getattr(error, "peer", None),
            time.monotonic(),
            isinstance(error, dist.DistBackendError),
        )
        reports.send(told)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


@contextlib.contextmanager
def world(size: int, *scenario: Any, hosts: Sequence[int] | None = None) -> Iterator[tuple[list[Any], Any]]:
    """The processes of a scenario and what they report; `hosts` pretends that they are on several."""
    context = multiprocessing.get_context("forkserver")
    reports, theirs = context.Pipe(duplex=False)  # no semaphore, which would have a name
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=rank_main, args=(rank, size, f"{folder}/store", theirs, hosts, *scenario), daemon=True
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            yield processes, reports
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            reports.close()
            theirs.close()


def collect(reports: Any, count: int) -> tuple[float, list[Report]]:
    """When the fault happened, and what so many ranks told."""
    struck, told = 0.0, []
    while len(told) < count or not struck:
        came = reports.recv()
        if isinstance(came, Report):
            told.append(came)
        else:
            struck = came[1]
    return struck, told


@pytest.mark.timed
@pytest.mark.parametrize(
    ("way", "length"),
    [
        *[("sync", 3), ("sync", 10**6), ("async", 3), ("future", 10**6), ("gather", 3), ("recv", 3), ("new_group", 0)],
        *[("broadcast", 3), ("barrier", 0), ("monitored", 0)],
        *[
            pytest.param(way, length, marks=pytest.mark.slow)
            for way, length in [
                ("gather", LARGE),
                ("scatter", 3),
                ("scatter", LARGE),
                ("async", LARGE),
                ("recv", LARGE),
                ("broadcast", LARGE),
                ("send", LARGE),
            ]
        ],
    ],
)
def test_a_killed_rank_is_named(way: str, length: int) -> None:
    with world(3, way, length, "kill", 30.0) as (_, reports):
        struck, told = collect(reports, 2)
        for report in told:
            assert report.kind == "PeerLost" or way == "future", report
            assert f"rank {CULPRIT}" in report.message
            assert report.when - struck < DEATH_SECONDS
            assert report.is_torchs or way == "future"


@pytest.mark.timed
def test_a_rank_killed_under_ddp_is_named() -> None:
    with world(2, "ddp", 3, "kill", 30.0) as (_, reports):
        struck, (report,) = collect(reports, 1)
        assert f"lost rank {CULPRIT}" in report.message
        assert report.when - struck < DEATH_SECONDS


ON_SEVERAL_HOSTS = [pytest.param(hosts, marks=pytest.mark.slow) for hosts in ([0, 0, 1], [0, 1, 1], [0, 1, 2])]


@pytest.mark.timed
@pytest.mark.parametrize("hosts", ON_SEVERAL_HOSTS)
@pytest.mark.parametrize("way", ["sync", "async", "recv"])
def test_a_stopped_rank_is_named_on_several_hosts(way: str, hosts: list[int]) -> None:
    with world(3, way, 3, "stop", STOP_SECONDS, hosts=hosts) as (processes, reports):
        struck, told = collect(reports, 2)
        for report in told:
            assert report.kind == "PeerTimeout", report
            assert report.peer == CULPRIT
            assert STOP_SECONDS * 0.9 < report.when - struck < STOP_SECONDS + 4.0
        os.kill(processes[CULPRIT].pid, signal.SIGCONT)


@pytest.mark.timed
@pytest.mark.parametrize(
    ("way", "length"),
    [
        *[("sync", 3), ("async", 3), ("recv", 3)],
        *[pytest.param(way, LARGE, marks=pytest.mark.slow) for way in ("sync", "async", "gather", "scatter")],
    ],
)
def test_a_stopped_rank_is_named_at_the_deadline(way: str, length: int) -> None:
    with world(3, way, length, "stop", STOP_SECONDS) as (processes, reports):
        struck, told = collect(reports, 2)
        for report in told:
            assert report.kind == "PeerTimeout", report
            assert report.peer == CULPRIT
            assert STOP_SECONDS * 0.9 < report.when - struck < STOP_SECONDS + 2.0
        os.kill(processes[CULPRIT].pid, signal.SIGCONT)


@pytest.mark.timed
@pytest.mark.parametrize("way", ["sync", "gather", "broadcast", "barrier", "monitored", "recv"])
def test_a_rank_that_raises_and_leaves_is_named(way: str) -> None:
    with world(3, way, 3, "raise", 30.0) as (_, reports):
        struck, told = collect(reports, 3)
        for report in told:
            if report.rank == CULPRIT:
                assert report.kind == "ValueError"
            else:
                assert report.kind == "PeerLost", report
                assert report.peer == CULPRIT
                assert report.when - struck < DEATH_SECONDS


@pytest.mark.parametrize(
    "hosts", [None, *ON_SEVERAL_HOSTS[:2]]
)  # where it has a peer on its host, which compares calls
@pytest.mark.parametrize("fault", ["other shape", "other call"])
def test_ranks_that_call_something_else_get_the_table(fault: str, hosts: list[int] | None) -> None:
    with world(3, "async", 3, fault, 30.0, hosts=hosts) as (_, reports):
        _, told = collect(reports, 3)
        for report in told:
            assert report.kind == "CollectiveMismatch", report
            assert report.is_torchs
            near = 2 if hosts == [0, 1, 1] else 0  # on its host
            assert f"rank {near}: all_reduce(sum) of float32[3]" in report.message
            other = "all_reduce(sum) of float32[5]" if fault == "other shape" else "broadcast(src=0) of float32[3]"
            assert f"rank {CULPRIT}: {other}" in report.message
