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

from murmura import DistributedConfig, RendezvousError, SharedMemoryTransport, TransportError, connect
from murmura.transports.shared_memory.rendezvous import socket_address

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


def test_silent_visitors_delay_nobody():
    job = uuid.uuid4().hex
    with contextlib.ExitStack() as crowd, ThreadPoolExecutor(2) as pool:
        host = pool.submit(join, job, 0)
        for _ in range(2):
            knock(crowd, job)
        began = time.monotonic()
        guest = pool.submit(join, job, 1)
        assert (host.result(), guest.result()) == (0.5, 0.5)
        assert time.monotonic() - began < 4.0


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
