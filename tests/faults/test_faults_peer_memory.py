"""Ranks that read each other's memory: one dies while it is read, or the kernel refuses."""

import ctypes
import os
import platform
import select
import signal
import struct

import pytest
import torch
from culprits import LARGE
from expect import DEATH_SECONDS, expect_lost
from scenario import NUM_HEALTHY, Stage, World

from murmura import SharedMemoryTransport, Transport, run_world
from murmura.transports.shared_memory import peer_memory
from murmura.transports.shared_memory.peer_memory import SIGHTINGS, PeerMemory

PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}


def _can_collapse() -> bool:
    tensor = torch.ones(LARGE)
    return peer_memory._collapse(tensor.data_ptr(), tensor.nbytes)


needs_attach = pytest.mark.skipif(not _can_collapse(), reason="this kernel has no MADV_COLLAPSE")


def refuse() -> None:
    """Let the kernel refuse to read other processes' memory from this process, as a container's rules may."""
    load, jump_if_equal, answer = 0x20, 0x15, 0x06
    allow, deny = 0x7FFF0000, 0x00050000 | 1  # EPERM
    rules = [(load, 0, 0, 0), (jump_if_equal, 0, 1, PROCESS_VM_READV[platform.machine()]), (answer, 0, 0, deny)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in [*rules, (answer, 0, 0, allow)])
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def count_reads() -> list[int]:
    """How often this rank reads a peer's memory from now on, as the one element."""
    reads = [0]
    read = PeerMemory.read

    def counted(self: PeerMemory, *args: int) -> None:
        reads[0] += 1
        read(self, *args)

    PeerMemory.read = counted  # type: ignore[method-assign]
    return reads


def repeat(transport: Transport, operation: str, refusing: tuple[int, ...]) -> tuple[bool, int]:
    """Whether all results of one operation on one tensor are right, and how often this rank read a peer's memory."""
    if transport.rank in refusing:
        refuse()
    reads, n, rank = count_reads(), transport.world_size, transport.rank
    whole, part = torch.empty(n * LARGE), torch.empty(LARGE)
    places = torch.arange(n * LARGE, dtype=torch.float32).remainder(1013)
    right = True
    for number in range(2 * SIGHTINGS):
        total = (places * n).add(n * number + n * (n - 1) // 2)
        if operation == "all_reduce":
            transport.all_reduce(torch.add(places, number + rank, out=whole))
            right &= torch.equal(whole, total)
        elif operation == "reduce_scatter_into":
            transport.reduce_scatter_into(part, torch.add(places, number + rank, out=whole))
            right &= torch.equal(part, total.chunk(n)[rank])
        else:
            own = whole.chunk(n)[rank] if operation == "all_gather_into itself" else part
            torch.add(places[:LARGE], number + rank, out=own)
            transport.all_gather_into(whole, own)
            right &= torch.equal(whole, torch.cat([places[:LARGE] + number + peer for peer in range(n)]))
    return right, reads[0]


@needs_attach
@pytest.mark.parametrize(
    ("operation", "world_size"),
    [
        ("all_reduce", 2),
        ("all_reduce", 3),
        ("all_gather_into", 2),
        ("all_gather_into itself", 3),
        ("reduce_scatter_into", 3),
    ],
)
def test_a_tensor_used_often_is_read_where_it_lies(operation, world_size):
    for right, num_reads in run_world(repeat, world_size, operation, (), kind="processes"):
        assert right
        assert num_reads > 0


@pytest.mark.skipif(platform.machine() not in PROCESS_VM_READV, reason="the number of the system call is not known")
@pytest.mark.parametrize("refusing", [(0, 1), (1,)])
@pytest.mark.parametrize("operation", ["all_reduce", "all_gather_into", "reduce_scatter_into"])
def test_where_the_kernel_refuses_ranks_stage(operation, refusing):
    assert run_world(repeat, 2, operation, refusing, kind="processes") == [(True, 0)] * 2


def die_while_read(stage: Stage) -> None:
    """Rank 1 kills itself in the middle of an all-reduce; rank 0 reads its memory after that."""
    transport = stage.transport
    assert isinstance(transport, SharedMemoryTransport)
    tensor = torch.ones(LARGE)
    for _ in range(max(NUM_HEALTHY, SIGHTINGS)):
        transport.all_reduce(tensor)
    read = PeerMemory.read

    def read_then(self: PeerMemory, peer: int, *args: int) -> None:
        if stage.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        select.select([self._control.life_fds[peer]], [], [], 20.0)
        stage.mark()
        stage.tell("read")
        read(self, peer, *args)

    PeerMemory.read = read_then  # type: ignore[method-assign]
    transport.all_reduce(tensor)


@needs_attach
@pytest.mark.timed
def test_a_rank_that_dies_while_it_is_read_is_named():
    with World("processes", 2, die_while_read) as world:
        report = world.actors[0].report()
        world.actors[0].await_word("read")
        expect_lost(report, 1)
        assert report.waited < DEATH_SECONDS


def refuse_later(stage: Stage) -> None:
    """Rank 1 restricts itself after it had read its peer's memory."""
    tensor = torch.ones(LARGE)
    for _ in range(max(NUM_HEALTHY, SIGHTINGS)):
        stage.transport.all_reduce(tensor)
    if stage.rank == 1:
        refuse()
    stage.transport.all_reduce(tensor)


@needs_attach
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in PROCESS_VM_READV, reason="the number of the system call is not known")
def test_a_refusal_that_comes_later_is_an_error_on_every_rank():
    with World("processes", 2, refuse_later) as world:
        refused, other = world.actors[1].report(), world.actors[0].report()
    assert refused.kind == "TransportError"
    assert (refused.rank, refused.peer) == (1, 0)
    assert "could read the memory of rank 0 before" in refused.message
    assert other.peer == 1
