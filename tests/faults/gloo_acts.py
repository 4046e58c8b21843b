"""Scenarios on Gloo: ranks that meet at a file and talk over the loopback, and what they do there."""

import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from acts import Run
from culprits import fail_by
from scenario import NUM_HEALTHY, Act, Actor, Stage, World, play

from murmura import ProcessGroupTransport, Transport, run_world
from murmura.transports.process_group import Check
from murmura.transports.rendezvous import file_store

NUMEL = 1024


class GlooWorld(World):
    """Ranks that are processes joined by Gloo; with `check="always"` they compare calls before every operation.

    They meet at a file, or, if the store is `served`, at a TCPStore of rank 0.
    """

    def __init__(
        self,
        world_size: int,
        act: Act,
        *args: Any,
        timeout: float = 20.0,
        check: str = "best_effort",
        served: bool = False,
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="gloo-scenario-")
        self.check = check
        self.served = served
        super().__init__("gloo", world_size, act, *args, timeout=timeout)

    def start(self, rank: int) -> Actor:
        world = (os.path.join(self.folder, "store"), self.served, rank, self.world_size, self.check)
        self.actors[rank] = Actor(f"rank {rank}", join_gloo_and_play, *world, *self._play)
        return self.actors[rank]

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            shutil.rmtree(self.folder)


def join_gloo_and_play(
    pipe: Connection,
    store_file: str,
    served: bool,
    rank: int,
    world_size: int,
    check: str,
    timeout: float,
    act: Act,
    args: Sequence[Any],
) -> None:
    """The life of a rank in a process of its own."""
    torch.set_num_threads(1)
    store = tcp_store(store_file, world_size, rank) if served else file_store(store_file, world_size)
    transport = ProcessGroupTransport.join(store, rank, world_size, check=check, timeout=timeout)
    pipe.send(("joined", {}))
    play(pipe, transport, act, args)


def tcp_store(store_file: str, world_size: int, rank: int) -> Any:
    """A store that rank 0 serves, at a port that it tells the others in a file."""
    told: Any = file_store(store_file, world_size)
    port = int(told.get("port")) if rank > 0 else 0
    store: Any = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
    if rank == 0:
        told.set("port", str(store.port))
    return store


def split_when_told(stage: Stage, culprit: int) -> None:
    """The culprit is to be stopped, the others split off a channel without it."""
    stage.transport.barrier()
    if stage.rank == culprit:
        stage.tell("fault")
    stage.hear()
    stage.mark()
    stage.transport.split("others", [rank for rank in range(stage.world_size) if rank != culprit])


def come_late(stage: Stage, culprit: int, late: int) -> None:
    """The culprit raises in the middle of all-reduces; the rank that is late reduces only when it is told to."""
    run = Run(stage, "prepared")
    for _ in range(NUM_HEALTHY):
        run.all_reduce()
    if stage.rank == culprit:
        raise ValueError("the loader broke")
    if stage.rank == late:
        stage.tell("late")
        stage.hear()
    run.all_reduce()


# For run_world
LARGE = 10**6  # elements, which Gloo itself reduces


def fail_as(transport: Transport, fault: str, check: str) -> None:
    """Healthy all-reduces, then rank 1 fails in the way named; the others go on."""
    assert isinstance(transport, ProcessGroupTransport)
    transport.check = Check(check)
    tensor = torch.ones(NUMEL)
    for _ in range(NUM_HEALTHY):
        transport.all_reduce(tensor.fill_(1.0))
        assert torch.equal(tensor, torch.full((NUMEL,), 3.0))
    if transport.rank == 1:
        if fault == "return":
            return
        fail_by(fault)
        if fault == "barrier":
            transport.barrier()
        if fault == "broadcast":
            transport.broadcast(tensor)
        if fault == "longer":
            transport.all_reduce(torch.ones(NUMEL + 1))
        if fault == "shorter":
            transport.all_reduce(torch.ones(NUMEL // 2))
        if fault == "float64":
            transport.all_reduce(torch.ones(NUMEL, dtype=torch.float64))
        if fault == "int16":
            transport.all_reduce(torch.ones(NUMEL, dtype=torch.int16))
        if fault == "max":
            transport.all_reduce(tensor, "max")
    if fault in ("large and longer", "large and shorter"):
        other = 2 * LARGE if fault == "large and longer" else LARGE // 2
        transport.all_reduce(torch.ones(other if transport.rank == 1 else LARGE))
    for _ in range(2):
        transport.all_reduce(tensor)


def wait_for_rank_0(transport: Transport) -> None:
    """Says "rank pid" on the standard output; then rank 0 does not come."""
    transport.barrier()
    os.write(1, f"{transport.rank} {os.getpid()}\n".encode())
    if transport.rank == 0:
        signal.pause()
    transport.barrier()


if __name__ == "__main__":  # a user's program, which is interrupted
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell that started the tests did
    run_world(wait_for_rank_0, 3, kind="processes", transport="gloo")
