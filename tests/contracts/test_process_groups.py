"""Process groups: beside the user's own, on a group that was handed over, without a store, and as a launcher starts us.

The ranks are processes of a world on shared memory, which only starts them and brings their results.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forked import run_forked, torchrun
from murmura import (
    ConfigError,
    DistributedConfig,
    PeerLost,
    PeerTimeout,
    ProcessGroupTransport,
    RendezvousError,
    Transport,
    TransportClosed,
    TransportError,
    UsageError,
    connect,
    run_world,
)
from murmura.transports.host import number_hosts
from murmura.transports.rendezvous import file_store

SECONDS = 30.0
ROUNDS = 20
SIZES = (1, 1000, 100_000)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    return run_world(fn, world_size, *args, kind="processes", timeout=SECONDS)


@contextlib.contextmanager
def users_group(rank: int, world_size: int, folder: Path) -> Iterator[Any]:
    """The default process group of a user's program."""
    store = dist.FileStore(str(folder / "user"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=SECONDS))
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def join(launcher: Transport, folder: Path, **options: Any) -> ProcessGroupTransport:
    """A transport on a store of its own."""
    store = file_store(str(folder / "own"), launcher.world_size)
    options = {"timeout": SECONDS, **options}
    return ProcessGroupTransport.join(store, launcher.rank, launcher.world_size, **options)


def bare_group(launcher: Transport, folder: Path) -> Any:
    """A group that does not give its store."""
    store = dist.FileStore(str(folder / "bare"), launcher.world_size)
    return dist.ProcessGroupGloo(store, launcher.rank, launcher.world_size, timedelta(seconds=SECONDS))


# Beside the user's own groups


def use_all_in_flight(launcher: Transport, folder: Path) -> None:
    """Operations of the user's groups and of two transports under way at once, ended in another order."""
    rank, n = launcher.rank, launcher.world_size
    with users_group(rank, n, folder) as world:
        mine, given = dist.new_group(), dist.new_group()
        with join(launcher, folder) as joined, ProcessGroupTransport(given, timeout=SECONDS) as handed:
            for number in range(ROUNDS):
                tensors = [torch.full((SIZES[number % 3],), rank + 1.0 + number + 100 * which) for which in range(4)]
                works: list[Any] = [
                    dist.all_reduce(tensors[0], async_op=True),
                    joined.all_reduce(tensors[1], async_op=True),
                    handed.all_reduce(tensors[2], async_op=True),
                    dist.all_reduce(tensors[3], group=mine, async_op=True),
                ]
                for work in reversed(works) if number % 2 else works:
                    work.wait()
                for which, tensor in enumerate(tensors):
                    total = sum(each + 1.0 + number + 100 * which for each in range(n))
                    assert torch.equal(tensor, torch.full_like(tensor, total))
            assert_untouched(world, rank, n)
        assert_untouched(world, rank, n)
        for group in (world, mine, given):  # also the one that was handed over
            assert dist.all_reduce(tensor := torch.ones(3), group=group) is None
            assert tensor.tolist() == [n] * 3


def assert_untouched(world: Any, rank: int, world_size: int) -> None:
    assert dist.is_initialized()
    assert dist.group.WORLD is world
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, world_size, "gloo")


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_transports_and_the_users_groups_are_used_at_once(world_size: int, tmp_path: Path) -> None:
    run_ranks(use_all_in_flight, world_size, tmp_path)


def use_all_from_threads(launcher: Transport, folder: Path) -> list[str]:
    """The user's world, a transport of its own and one on a user's group, each used by a thread of its own."""
    rank, n = launcher.rank, launcher.world_size
    wrong: list[str] = []

    def check(name: str, reduce: Callable[[torch.Tensor], object]) -> None:
        try:
            for number in range(ROUNDS):
                tensor = torch.full((SIZES[number % 3],), float(rank + number))
                reduce(tensor)
                expected = float(sum(each + number for each in range(n)))
                if not torch.equal(tensor, torch.full_like(tensor, expected)):
                    wrong.append(f"{name}, round {number}: {tensor[:3].tolist()}, not {expected}")
        except Exception as error:
            wrong.append(f"{name}: {error!r}")

    with users_group(rank, n, folder) as world:
        given = dist.new_group()
        with join(launcher, folder) as joined, ProcessGroupTransport(given, timeout=SECONDS) as handed:
            users: dict[str, Callable[[torch.Tensor], object]] = {
                "user": dist.all_reduce,
                "joined": joined.all_reduce,
                "handed over": handed.all_reduce,
                "channel": handed.channel("side").all_reduce,
            }
            threads = [threading.Thread(target=check, args=each) for each in users.items()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert_untouched(world, rank, n)
    return wrong


def test_two_transports_and_the_users_group_are_used_from_threads(tmp_path: Path) -> None:
    assert run_ranks(use_all_from_threads, 2, tmp_path) == [[], []]


def use_the_default_group(launcher: Transport, folder: Path) -> tuple[Any, ...]:
    """The user's default group, handed over and used in turn with the user."""
    rank, n = launcher.rank, launcher.world_size
    with users_group(rank, n, folder) as world:
        handed = ProcessGroupTransport(world, timeout=SECONDS)
        facts = (handed.rank, handed.world_size, tuple(handed.hosts))
        for number in range(4):
            tensor = torch.full((5,), float(rank + number))
            dist.all_reduce(tensor)
            handed.all_reduce(tensor)
            assert tensor.tolist() == [float(n * sum(each + number for each in range(n)))] * 5
        out = torch.zeros(3)
        handed.exchange([(torch.full((3,), float(rank)), 1 - rank)], [(out, 1 - rank)])
        assert out.tolist() == [1.0 - rank] * 3
        channel = handed.channel("side")
        channel.barrier()
        handed.close()
        handed.close()
        for closed in (handed, channel):
            with pytest.raises(TransportClosed):
                closed.barrier()
        assert_untouched(world, rank, n)
        dist.all_reduce(tensor := torch.ones(2))
        assert tensor.tolist() == [n] * 2
    return facts


def test_closing_does_not_destroy_the_default_group_it_was_given(tmp_path: Path) -> None:
    assert run_ranks(use_the_default_group, 2, tmp_path) == [(0, 2, (0, 0)), (1, 2, (0, 0))]


def join_alone(launcher: Transport, folder: Path) -> tuple[Any, ...]:
    with join(launcher, folder) as transport:
        transport.barrier()
        return dist.is_initialized(), tuple(transport.hosts), tuple(transport.channel("side").hosts)


def test_a_transport_of_its_own_is_not_torchs_default_and_numbers_its_hosts(tmp_path: Path) -> None:
    assert run_ranks(join_alone, 3, tmp_path) == [(False, (0, 0, 0), (0, 0, 0))] * 3


def test_hosts_are_numbered_in_the_order_of_their_first_rank() -> None:
    assert number_hosts(["b", "a", "b", "c", "a"]) == [0, 1, 0, 2, 1]
    assert number_hosts([]) == []


def pretend_hosts(launcher: Transport, folder: Path) -> tuple[Any, ...]:
    with join(launcher, folder, hosts=[0, 1, 1]) as transport:
        part = transport.subgroup([2, 0])
        return tuple(transport.hosts), None if part is None else tuple(part.hosts)


def test_a_subgroup_knows_the_hosts_of_its_members(tmp_path: Path) -> None:
    results = run_ranks(pretend_hosts, 3, tmp_path)
    assert results == [((0, 1, 1), (1, 0)), ((0, 1, 1), None), ((0, 1, 1), (1, 0))]


# What Gloo cannot add


def reduce_in_any_dtype(launcher: Transport, folder: Path, check: str) -> None:
    n = launcher.world_size
    with join(launcher, folder, check=check) as transport:
        for numel in (1, 7, 100_003):
            each = [(torch.arange(numel) % 5 + rank).to(torch.int16) for rank in range(n)]
            for op, expected in (("sum", sum(each)), ("max", each[-1]), ("min", each[0]), ("product", _product(each))):
                out = transport.all_reduce(each[transport.rank].clone(), op)
                assert out.dtype is torch.int16
                assert torch.equal(out, expected), op
            flags = [torch.arange(numel) % n == rank for rank in range(n)]
            assert bool(transport.all_reduce(flags[transport.rank].clone(), "max").all())
            assert not bool(transport.all_reduce(flags[transport.rank].clone(), "min").any())
            ticket: Any = transport.all_reduce(each[transport.rank].clone(), async_op=True)
            assert torch.equal(ticket.wait(), sum(each))


def _product(tensors: list[torch.Tensor]) -> torch.Tensor:
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        result *= tensor
    return result


@pytest.mark.parametrize("check", ["best_effort", "always"])
def test_int16_and_bool_are_reduced_although_gloo_has_neither(check: str, tmp_path: Path) -> None:
    run_ranks(reduce_in_any_dtype, 3, tmp_path, check)


# A group without its store


def use_without_store(launcher: Transport, folder: Path) -> str:
    n = launcher.world_size
    with ProcessGroupTransport(bare_group(launcher, folder), timeout=SECONDS) as transport:
        assert transport.all_reduce(torch.ones(3)).tolist() == [n] * 3
        assert tuple(transport.hosts) == (0,) * n
        with pytest.raises(UsageError, match="does not give its store") as caught:
            transport.split("side")
        transport.barrier()  # the refusal broke nothing
        return str(caught.value)


def test_a_group_without_a_store_works_but_cannot_be_split(tmp_path: Path) -> None:
    for words in run_ranks(use_without_store, 2, tmp_path):
        assert "ProcessGroupTransport(group, store=store)" in words


def use_with_store_given(launcher: Transport, folder: Path) -> None:
    store = file_store(str(folder / "given"), launcher.world_size)
    with ProcessGroupTransport(bare_group(launcher, folder), store=store, timeout=SECONDS) as transport:
        assert transport.channel("side").all_reduce(torch.ones(3)).tolist() == [launcher.world_size] * 3


def test_a_group_whose_store_is_given_can_be_split(tmp_path: Path) -> None:
    run_ranks(use_with_store_given, 2, tmp_path)


def miss_one(launcher: Transport, folder: Path, leaves: bool) -> tuple[Any, ...] | None:
    group = bare_group(launcher, folder)
    transport = ProcessGroupTransport(group, timeout=0.5)
    transport.barrier(timeout=SECONDS)
    if launcher.rank == 1:
        transport.close()
        if leaves:
            del group, transport  # its connections close
        launcher.barrier()
        return None
    with pytest.raises(TransportError, match="rank 0: all_reduce #2 failed after") as caught:
        transport.all_reduce(torch.ones(3))
    with pytest.raises(type(caught.value), match="failed earlier"):
        transport.all_reduce(torch.ones(3))
    launcher.barrier()
    transport.close()
    return type(caught.value), caught.value.rank, caught.value.peer, str(caught.value)


@pytest.mark.parametrize("leaves", [False, True])
def test_without_a_store_no_rank_can_be_named_and_the_error_says_so(leaves: bool, tmp_path: Path) -> None:
    kind, rank, peer, words = run_ranks(miss_one, 2, tmp_path, leaves)[0]
    assert kind is (TransportError if leaves else PeerTimeout)
    assert (rank, peer) == (0, None)
    assert "Which rank is at fault cannot be told, for this process group does not give its store." in words


# As a launcher starts us


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def connect_by_environment(launcher: Transport, port: int) -> tuple[Any, ...]:
    settings = {"RANK": launcher.rank, "WORLD_SIZE": launcher.world_size, "LOCAL_RANK": launcher.rank}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "MURMURA_TRANSPORT": "gloo"}
    os.environ.update({name: str(value) for name, value in settings.items()})
    with connect() as transport:
        total = transport.all_reduce(torch.tensor([transport.rank + 1.0])).item()
        side = transport.channel("side").all_reduce(torch.tensor([transport.rank + 1.0]), "max").item()
        facts = type(transport).__name__, transport.rank, tuple(transport.hosts), total, side
        transport.barrier()
    return facts


def test_connect_by_the_environment() -> None:
    first, second = run_ranks(connect_by_environment, 2, free_port())
    assert first == ("ProcessGroupTransport", 0, (0, 0), 3.0, 2.0)
    assert second == ("ProcessGroupTransport", 1, (0, 0), 3.0, 2.0)


def test_connect_where_a_launcher_already_serves_the_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = run_ranks(connect_by_environment, 2, store.port)
    assert (first[1:], second[1:]) == ((0, (0, 0), 3.0, 2.0), (1, (0, 0), 3.0, 2.0))
    assert store.num_keys() > 1  # they met there


SCRIPT = """
import os

import torch
from murmura import connect

with connect() as transport:
    total = transport.all_reduce(torch.tensor([transport.rank + 1.0])).item()
    side = transport.channel("side").all_reduce(torch.tensor([transport.rank + 1.0])).item()
    line = f"{type(transport).__name__} {transport.rank} of {transport.world_size}: {total} {side}\\n"
    os.write(1, line.encode())
"""


def test_connect_under_torchrun_whose_agent_holds_the_port(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    variables = {"MURMURA_TRANSPORT": "gloo", "MURMURA_TIMEOUT": "30", "OMP_NUM_THREADS": "1"}
    ended = run_forked(torchrun, ["--standalone", "--nproc-per-node", "2", str(script)], variables=variables)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split("\n"))[-2:] == [
        f"ProcessGroupTransport {rank} of 2: 3.0 3.0" for rank in range(2)
    ], ended.stdout


def meet(rank: int, world_size: int, port: int, **options: Any) -> Transport:
    address = f"127.0.0.1:{port}"
    return connect(
        DistributedConfig(world_size=world_size, rank=rank, coordinator_addr=address, transport="gloo", **options)
    )


def connect_all_but_one(launcher: Transport, port: int, missing: int) -> tuple[Any, ...] | None:
    if launcher.rank == missing:
        launcher.barrier()
        return None
    began = time.monotonic()
    with pytest.raises(RendezvousError) as caught:
        meet(launcher.rank, launcher.world_size, port, timeout=1.0)
    seconds = time.monotonic() - began
    launcher.barrier()
    return caught.value.missing, str(caught.value), seconds


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_rank_is_named(missing: int) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        port = free_port() if missing else nobody.getsockname()[1]
        results = run_ranks(connect_all_but_one, 3, port, missing)
    assert results.pop(missing) is None
    for names, words, seconds in results:
        assert names == (missing,)
        assert seconds < 10
        assert f"[{missing}] did not come" in words or "did not reach the store of rank 0" in words


def test_a_missing_rank_is_named_in_a_file_too(tmp_path: Path) -> None:
    store = file_store(str(tmp_path / "store"), 4)
    store.set("here/2", '["", "0", "somewhere", "there", 1, ""]')
    with pytest.raises(RendezvousError, match=r"of 4 ranks \[0, 3\] did not come") as caught:
        ProcessGroupTransport.join(store, 1, 4, timeout=0.2)
    assert caught.value.missing == (0, 3)


def test_gloo_needs_an_address() -> None:
    with pytest.raises(ConfigError, match="coordinator_addr"):
        connect(DistributedConfig(world_size=2, rank=0, coordinator_addr="", transport="gloo"))


def lose_the_store(launcher: Transport, port: int, folder: Path) -> None:
    transport = meet(launcher.rank, launcher.world_size, port, timeout=SECONDS)
    transport.barrier()
    if launcher.rank == 0:
        os._exit(7)
    began = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        transport.barrier()
    (folder / str(launcher.rank)).write_text(f"{caught.value.peer} {time.monotonic() - began}")
    transport.close()


def test_the_death_of_the_rank_that_serves_the_store_is_named_too(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="rank 0 exited with status 7"):
        run_ranks(lose_the_store, 3, free_port(), tmp_path)
    for rank in (1, 2):
        peer, seconds = (tmp_path / str(rank)).read_text().split()
        assert int(peer) == 0
        assert float(seconds) < 5


def test_only_gloo_and_nccl_groups_are_built(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not 'mpi'"):
        ProcessGroupTransport.join(file_store(str(tmp_path / "store"), 1), 0, 1, kind="mpi")
    with pytest.raises(ConfigError, match="check"):
        ProcessGroupTransport.join(file_store(str(tmp_path / "other"), 1), 0, 1, check="sometimes")


def close_during(launcher: Transport, folder: Path) -> tuple[str, float]:
    """Rank 0 closes while its own operation waits in the communication thread; rank 1 never comes."""
    transport = join(launcher, folder)
    transport.barrier()
    if launcher.rank == 1:
        launcher.barrier()
        with pytest.raises(PeerLost, match="rank 0 closed its transport and left") as caught:
            transport.barrier()
        transport.close()
        return type(caught.value).__name__, 0.0
    ticket: Any = transport.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(PeerTimeout):
        ticket.wait(0.1)  # it is under way
    began = time.monotonic()
    transport.close()
    seconds = time.monotonic() - began
    with pytest.raises(TransportClosed, match="rank 0 closed the transport during all_reduce #2") as closed:
        ticket.wait(0.0)
    launcher.barrier()
    return type(closed.value).__name__, seconds


def test_closing_ends_what_still_waits(tmp_path: Path) -> None:
    (kind, seconds), other = run_ranks(close_during, 2, tmp_path)
    assert kind == "TransportClosed"
    assert seconds < 2
    assert other[0] == "PeerLost"


def abort_during(launcher: Transport, folder: Path) -> tuple[str, float]:
    """Rank 0 aborts in one thread while its own operation waits in another; rank 1 never comes."""
    transport = join(launcher, folder)
    transport.barrier()
    if launcher.rank == 1:
        launcher.barrier()
        transport.close()
        return "", 0.0
    ticket: Any = transport.all_reduce(torch.ones(3), async_op=True)
    with pytest.raises(PeerTimeout):
        ticket.wait(0.1)  # it is under way
    began = time.monotonic()
    transport.abort(RuntimeError("enough"))
    with pytest.raises(TransportError) as ended:
        ticket.wait(SECONDS)
    seconds = time.monotonic() - began
    launcher.barrier()
    transport.close()
    return type(ended.value).__name__, seconds


def test_an_abort_ends_what_still_waits(tmp_path: Path) -> None:
    assert run_ranks(abort_during, 2, tmp_path)[0][1] < 2
