"""Processes at the rendezvous of a world that do not belong there, and one that joins many worlds in its life."""

import array
import contextlib
import gc
import json
import os
import socket
import time
from multiprocessing.connection import Connection

import torch
from traces import segments_of

from murmura import PeerLost, SharedMemoryTransport

NOBODY = 65534


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def knock_as_another_user(pipe: Connection, address: str, host_pid: int) -> None:
    """Follow the protocol as rank 1 would, but as another user; tell what was said and given."""
    _become_nobody()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.settimeout(20.0)
        give_up = time.monotonic() + 20.0
        while True:
            try:
                door.connect(address)
                break
            except ConnectionRefusedError:  # rank 0 has not come yet
                assert time.monotonic() < give_up
                os.sched_yield()
        hello = json.dumps({"rank": 1, "world_size": 2}).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [os.pidfd_open(os.getpid())]))]
        with contextlib.suppress(BrokenPipeError):  # turned away before it could speak
            door.sendmsg([hello], rights)
        try:
            said, fds, _, _ = socket.recv_fds(door, 4096, 253)
        except ConnectionResetError:  # the door was shut without a look at what we said
            said, fds = b"", []
    opened = []
    with contextlib.suppress(PermissionError):
        for name in os.listdir(f"/proc/{host_pid}/fd"):
            with contextlib.suppress(OSError):
                opened.append(os.open(f"/proc/{host_pid}/fd/{name}", os.O_RDONLY))
    pipe.send(("knocked", {"said": said.decode(), "fds": len(fds), "opened": len(opened)}))


def squat_as_another_user(pipe: Connection, address: str) -> None:
    """Hold a world's rendezvous as another user; tell what two visitors say."""
    _become_nobody()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(address)
        door.listen(1)
        pipe.send(("listening", {}))
        door.settimeout(20.0)
        for _ in range(2):
            guest = door.accept()[0]
            guest.settimeout(20.0)
            said, fds, _, _ = socket.recv_fds(guest, 4096, 253)
            pipe.send(("visited", {"said": said.decode(), "fds": len(fds)}))


def live_in_many_worlds(pipe: Connection, jobs: list[str], rank: int) -> None:
    """Join one world after the other, see one end well and the next badly; tell what each left in this process."""
    torch.set_num_threads(1)
    held = len(os.listdir("/proc/self/fd"))
    left = []
    for number, job in enumerate(jobs):
        _visit_world(job, rank, fails=number % 2 == 1)
        gc.collect()
        left.append((len(os.listdir("/proc/self/fd")) - held, segments_of()))
    pipe.send(("left", {"left": left}))


def _visit_world(job: str, rank: int, *, fails: bool) -> None:
    with contextlib.suppress(PeerLost), SharedMemoryTransport.join(job, rank, 2, timeout=20.0) as transport:
        small, large = torch.ones(8), transport.allocate(2**20)
        channel = transport.channel("side")
        for _ in range(3):
            transport.all_reduce(small)
            transport.all_reduce(large)
            channel.all_reduce(small, async_op=True).wait()
            transport.exchange([(small, 1 - rank)], [(small.clone(), 1 - rank)])
        if fails and rank == 1:
            return
        if fails:
            transport.barrier()
