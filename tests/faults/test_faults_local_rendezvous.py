"""What a process of the same user may say to the socket of a world, and who is accepted all the same."""

import array
import contextlib
import json
import os
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from murmura import ConfigError, DistributedConfig, RendezvousError, SharedMemoryTransport, TransportError, connect
from murmura.transports.announcement import Announcement
from murmura.transports.choice import Claim
from murmura.transports.shared_memory.rendezvous import meet, socket_address
from murmura.types import TransportKind

SECONDS = 20.0


def knock(crowd, job, said=None):
    """A client at the socket of `job`, which sends `said` and nothing more."""
    visitor = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    give_up = time.monotonic() + SECONDS
    while True:
        try:
            visitor.connect(socket_address(job))
            break
        except ConnectionRefusedError:  # rank 0 has not come yet
            assert time.monotonic() < give_up
            time.sleep(0.001)
    if said is not None:
        life = os.pidfd_open(os.getpid())
        visitor.sendmsg([said], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [life]))])
        os.close(life)
    return visitor


def join(job, rank):
    with SharedMemoryTransport.join(job, rank, 2, timeout=SECONDS) as transport:
        return float(transport.all_reduce(torch.tensor([float(rank)]), "mean"))


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 4000,
        json.dumps({"rank": True, "world_size": 2, "nonce": "0"}).encode(),
        json.dumps({"rank": 1.0, "world_size": 2, "nonce": "0"}).encode(),
        json.dumps({"rank": 1, "world_size": 2, "nonce": "\ud800"}).encode(),
        json.dumps({"rank": 1, "world_size": "\ud800" * 1000, "nonce": "0"}).encode(),
        b"\xff\xfe",
    ],
)
def test_whoever_does_not_follow_the_protocol_is_turned_away_and_the_world_works(said):
    job = uuid.uuid4().hex
    with contextlib.ExitStack() as crowd, ThreadPoolExecutor(2) as pool:
        host = pool.submit(join, job, 0)
        visitor = knock(crowd, job, said)
        visitor.settimeout(SECONDS)
        assert "did not follow the protocol" in json.loads(visitor.recv(4096))["refused"]
        guest = pool.submit(join, job, 1)
        assert (host.result(), guest.result()) == (0.5, 0.5)


@pytest.mark.parametrize("speaks", [True, False])
def test_a_visitor_that_seems_to_have_died_gets_nothing_without_the_secret(speaks):
    job = uuid.uuid4().hex
    dead, alive = os.pipe()
    os.close(alive)  # as the life descriptor of a rank that died
    segment = os.memfd_create("segment")
    with contextlib.ExitStack() as crowd, ThreadPoolExecutor(2) as pool:
        host = pool.submit(meet, job, 0, 2, segment, SECONDS, secret="swordfish")
        visitor = knock(crowd, job)
        visitor.settimeout(SECONDS)
        hello = json.dumps({"rank": 1, "world_size": 2, "nonce": "0"}).encode()
        visitor.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [dead]))])
        assert "nonce" in json.loads(visitor.recv(4096))
        visitor.send(b"?") if speaks else visitor.shutdown(socket.SHUT_WR)
        assert "does not know the job's secret" in json.loads(visitor.recv(4096))["refused"]
        pool.submit(meet, job, 1, 2, None, SECONDS, secret="swordfish").result().close()
        host.result().close()
        assert socket.recv_fds(visitor, 4096, 253)[:2] == (b"", [])
    os.close(dead)
    os.close(segment)


def test_a_rank_takes_no_segment_from_a_rank_0_that_has_proved_nothing():
    job = uuid.uuid4().hex
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door, ThreadPoolExecutor(1) as pool:
        door.bind(socket_address(job))
        door.listen(1)
        guest = pool.submit(meet, job, 1, 2, None, SECONDS, secret="swordfish")
        with door.accept()[0] as told:
            told.recv(4096)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 0, 0]))]
            told.sendmsg([json.dumps({"world_size": 2, "claims": ["", ""]}).encode()], rights)
            with pytest.raises(RendezvousError, match=r"rank 1 found .* a rank 0 that does not know the job's secret"):
                guest.result()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_another_user_announces_is_not_believed(monkeypatch):
    job = uuid.uuid4().hex
    with Announcement(job, 0, 2, Claim(TransportKind.GLOO)), Announcement(job, 1, 2, Claim()) as own:
        monkeypatch.setattr("murmura.transports.announcement.LOOK_SECONDS", 0.0)
        monkeypatch.setattr("murmura.transports.announcement.STAY_SECONDS", 0.0)
        assert isinstance(own.watch(), ConfigError)
        monkeypatch.setattr("murmura.transports.announcement.peer_ids", lambda probe: (0, os.getuid() + 1))
        assert own.watch() is None


@pytest.mark.parametrize("most", [3, 7])
def test_silent_visitors_delay_nobody(most, monkeypatch):
    monkeypatch.setattr("murmura.transports.shared_memory.rendezvous.MAX_RANKS", most)
    job = uuid.uuid4().hex
    with contextlib.ExitStack() as crowd, ThreadPoolExecutor(2) as pool:
        host = pool.submit(join, job, 0)
        visitors = [knock(crowd, job) for _ in range(5)]
        for visitor in visitors[: max(0, 5 - most)]:
            visitor.settimeout(SECONDS)
            assert "said nothing" in json.loads(visitor.recv(4096))["refused"]
        began = time.monotonic()
        guest = pool.submit(join, job, 1)
        assert (host.result(), guest.result()) == (0.5, 0.5)
        assert time.monotonic() - began < 4.0
        assert most < 7 or [visitor.recv(4096) for visitor in visitors] == [b""] * 5  # rank 0 has left without a word


def test_the_name_of_the_rendezvous_tells_nothing_of_the_secret_and_a_wrong_one_is_refused(monkeypatch):
    addresses = []
    bind = socket.socket.bind
    monkeypatch.setattr(socket.socket, "bind", lambda self, name: addresses.append(name) or bind(self, name))
    job = uuid.uuid4().hex

    def program(rank, secret, timeout):
        config = DistributedConfig(
            world_size=2, rank=rank, transport="shared_memory", job_id=job, secret=secret, timeout=timeout
        )
        with connect(config) as transport:
            return float(transport.all_reduce(torch.tensor([float(rank)]), "mean"))

    with ThreadPoolExecutor(2) as pool:
        for secret in ("swordfish", "goldfish"):
            ranks = [pool.submit(program, rank, secret, SECONDS) for rank in range(2)]
            assert [rank.result() for rank in ranks] == [0.5, 0.5]
        ranks = [pool.submit(program, rank, ("swordfish", "goldfish")[rank], 1.0) for rank in range(2)]
        for rank in ranks:
            with pytest.raises(RendezvousError, match="secret"):
                rank.result()
    rendezvous = [address for address in addresses if ":" not in address]  # the others announce a rank's choice
    assert len(rendezvous) == 5  # to sign in and to share memory, twice; and to sign in
    assert len(set(rendezvous)) == 2


def test_a_rank_that_cannot_map_the_segment_keeps_no_descriptor(monkeypatch):
    def refuse(*args):
        raise TransportError("no address space")

    monkeypatch.setattr("murmura.transports.shared_memory.transport.Segment", refuse)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError):
        SharedMemoryTransport.join(f"keeps-no-descriptor-{os.getpid()}", 0, 1)
    assert sorted(os.listdir("/proc/self/fd")) == before
