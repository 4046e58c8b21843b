"""One store, many worlds: connections one after the other and side by side, strangers, and who can reach it."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from murmura import (
    DDP,
    DistributedConfig,
    HierarchicalTransport,
    PeerLost,
    ProcessGroupTransport,
    RendezvousError,
    Transport,
    connect,
)
from murmura.transports import group_building
from murmura.transports.error_reporter import Reporter
from murmura.transports.failure_log import FailureLog
from murmura.transports.liveness import Liveness
from murmura.transports.rendezvous import Roster, file_store, reach_store, serve_store, sign_in, under
from murmura.transports.signed_store import SignedStore
from murmura.transports.watched_store import nobody, poll

SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_ranks(program: Callable[[int], Any], world_size: int = 2) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(program, range(world_size)))


def config(port: int, rank: int, **options: Any) -> DistributedConfig:
    address = f"127.0.0.1:{port}"
    settings = {"transport": "gloo", "timeout": SECONDS, **options}
    return DistributedConfig(world_size=2, rank=rank, coordinator_addr=address, **settings)


def mean_of_ranks(transport: Transport) -> float:
    return float(transport.channel("ddp").all_reduce(torch.tensor([float(transport.rank)]), "mean").item())


@pytest.mark.parametrize("secret", [None, "swordfish"])
def test_a_tenth_connection_in_one_environment_works_as_the_first(secret: str | None) -> None:
    port = free_port()

    def program(rank: int) -> list[float]:
        means, kept = [], []
        for number in range(10):
            transport = connect(config(port, rank, secret=secret))
            means.append(mean_of_ranks(transport))
            if number % 3:
                transport.close()
            else:
                kept.append(transport)
        means += [mean_of_ranks(transport) for transport in kept]
        for transport in kept:
            transport.close()
        return means

    assert on_ranks(program) == [[0.5] * 14] * 2


def test_several_models_on_one_process_group_each_with_a_transport_of_its_own(tmp_path: Path) -> None:
    def program(rank: int) -> list[float]:
        store = file_store(str(tmp_path / "store"), 2)
        group = dist.ProcessGroupGloo(under(store, "group"), rank, 2)
        results = []
        for _ in range(4):
            with ProcessGroupTransport(group, store=under(store, "murmura"), timeout=SECONDS) as transport:
                model = DDP(nn.Linear(1, 1, bias=False), transport)
                model(torch.full((1, 1), float(rank))).sum().backward()
                results.append(float(model.module.weight.grad))
                model.close()
        group.shutdown()
        return results

    assert on_ranks(program) == [[0.5] * 4] * 2


def test_hierarchies_on_one_store(tmp_path: Path) -> None:
    def program(rank: int) -> list[float]:
        store = file_store(str(tmp_path / "store"), 3)
        means = []
        for _ in range(3):
            with HierarchicalTransport.join(store, rank, 3, hosts=[0, 0, 1], timeout=SECONDS) as transport:
                means.append(mean_of_ranks(transport))
        return means

    assert on_ranks(program, 3) == [[1.0] * 3] * 3


def test_what_an_earlier_rendezvous_left_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """A rank that is still in the first rendezvous when rank 0 opens the second answers the first only."""

    def program(rank: int) -> list[bytes]:
        store = file_store(str(tmp_path / "store"), 2)
        heard = []
        for number in range(5):
            part = sign_in(store, rank, 2, SECONDS).store
            part.set(f"from/{rank}", str(number))
            assert poll(lambda part=part: part.check([f"from/{1 - rank}"]), SECONDS, nobody)
            heard.append(part.get(f"from/{1 - rank}"))
        return heard

    assert on_ranks(program) == [[b"0", b"1", b"2", b"3", b"4"]] * 2


def test_on_one_host_nobody_else_can_reach_the_store() -> None:
    port = free_port()
    store = serve_store("127.0.0.1", port, 1, SECONDS)
    tables = [Path(name).read_text().splitlines()[1:] for name in ("/proc/net/tcp", "/proc/net/tcp6")]
    rows = [row.split() for table in tables for row in table]
    listening = [address for _, address, _, state, *_ in rows if state == "0A" and address.endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]
    del store


def test_a_program_at_the_port_that_is_no_store_is_told_as_such() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        began = time.monotonic()
        with pytest.raises(RendezvousError, match=r"has not answered rank 1 for .* no store of torch's"):
            reach_store("127.0.0.1", other.getsockname()[1], 1, 1.0)
        assert time.monotonic() - began < 2.1


def test_a_store_that_answers_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one whose host asks a slow name server for the name of each client."""
    monkeypatch.setattr("murmura.transports.rendezvous.SILENT_SECONDS", 0.1)
    with socket.socket() as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        reached = pool.submit(reach_store, "127.0.0.1", port, 1, SECONDS)
        give_up = time.monotonic() + SECONDS
        while not caplog.records:
            assert not wait([reached], 0.01).done
            assert time.monotonic() < give_up
        make: Any = dist.TCPStore  # type: ignore[attr-defined]
        store = make(
            "127.0.0.1",
            port,
            1,
            True,
            timedelta(seconds=SECONDS),
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
        reached.result().set("key", "value")
        assert store.get("key") == b"value"
    assert "has not answered rank 1 for 0.1 s" in caplog.text


def test_a_store_that_nobody_serves_is_given_up_at_the_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=r"did not reach the store of rank 0 at .* within 1.0 s"):
        reach_store("127.0.0.1", free_port(), 1, 1.0)
    assert 0.9 < time.monotonic() - began < 2.1


def test_two_jobs_that_meet_at_one_place_are_told(tmp_path: Path) -> None:
    """Rank 0 of another job signs in while this one waits for its rank 1."""
    store = file_store(str(tmp_path / "store"), 2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(sign_in, store, 0, 2, 5.0)
        while not store.check(["rendezvous"]):
            time.sleep(0.001)
        second = pool.submit(sign_in, file_store(str(tmp_path / "store"), 2), 0, 2, 3.0)
        with pytest.raises(RendezvousError, match=r"another process .* signs in as the same rank"):
            first.result()
        assert isinstance(second.exception(), RendezvousError)


@pytest.mark.parametrize("secret", [None, "swordfish"])
@pytest.mark.parametrize("garbage", [b"not json", b"[" * 4000, b"{}", b'{"culprit": true}', b""])
def test_a_strangers_entry_hides_no_death(tmp_path: Path, secret: str | None, garbage: bytes) -> None:
    plain = file_store(str(tmp_path / "store"), 2)
    store = SignedStore(plain, secret, "job") if secret else plain
    for key in ("exited", "exited/1", "stalled/1"):
        plain.set(key, garbage)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    liveness = Liveness({1: child.pid})
    failure_log = FailureLog(store, 0, 2, liveness, Reporter(0, range(2)))
    assert failure_log.cause("barrier #1") is None
    child.communicate()
    error = failure_log.cause("barrier #1")
    assert isinstance(error, PeerLost)
    assert (error.rank, error.peer, error.operation) == (0, 1, "barrier #1")
    liveness.close()


@pytest.mark.parametrize("secret", [None, "swordfish"])
@pytest.mark.parametrize(("key", "late"), [("here/1", 0), ("rendezvous", 1)])
def test_a_stranger_who_overwrites_an_entry_does_not_keep_a_rank_out(
    tmp_path: Path, key: str, late: int, secret: str | None
) -> None:
    """The entry of the one that came first, before the other has read it."""
    plain = file_store(str(tmp_path / "store"), 2)
    store = SignedStore(plain, secret, "job") if secret else plain
    come = threading.Event()

    def vandalise() -> None:
        while not plain.check([key]):
            time.sleep(0.001)
        plain.set(key, b"garbage")
        come.set()

    def program(rank: int) -> Any:
        if rank == 2:
            return vandalise()
        if rank == late:
            come.wait(SECONDS)
        return sign_in(store, rank, 2, SECONDS).hosts

    assert on_ranks(program, 3) == [(0, 0), (0, 0), None]
    assert json.loads(store.get(key))


class _Store:
    """A store in which nothing is ever said."""

    def check(self, keys: list[str]) -> bool:
        return False

    def set(self, key: str, value: bytes) -> None:
        return


def test_a_thread_that_torch_does_not_let_end_holds_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def make_group(store: Any, *_: object) -> None:
        stuck.set()
        may_end.wait(30.0)
        with pytest.raises(AttributeError):
            store.check(["connected"])
        ended.set()

    monkeypatch.setattr(group_building, "group_maker", lambda store, *_: lambda: make_group(store))
    monkeypatch.setattr(group_building, "under", lambda store, prefix: store)
    store = _Store()
    kept = weakref.ref(store)
    reporter = Reporter(0, range(2))

    def watch() -> PeerLost | None:
        return reporter.lost(1, "the rendezvous") if stuck.is_set() else None

    with pytest.raises(PeerLost):
        group_building.build_group(
            Roster(0, (0, 0), {}, store, (0, 1), "token", ("", "")), 2, "gloo", 20.0, reporter, watch
        )
    del store
    gc.collect()
    assert kept() is None
    may_end.set()
    assert ended.wait(30.0)
