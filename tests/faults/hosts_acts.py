"""Scenarios on several hosts: ranks that pretend to be on them, joined by the hierarchical transport."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from gloo_acts import tcp_store
from scenario import Act, Actor, Stage, World, play

from murmura import HierarchicalTransport, PeerLost
from murmura.transports.rendezvous import file_store


class HostsWorld(World):
    """Ranks that are processes; hosts[r] is the host of rank r. `served` is as in `GlooWorld`."""

    def __init__(
        self,
        hosts: Sequence[int],
        act: Act,
        *args: Any,
        timeout: float = 20.0,
        check: str = "best_effort",
        served: bool = False,
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="hosts-scenario-")
        self.hosts = hosts
        self.check = check
        self.served = served
        super().__init__("hierarchical", len(hosts), act, *args, timeout=timeout)

    def start(self, rank: int) -> Actor:
        world = (os.path.join(self.folder, "store"), self.served, rank, self.hosts, self.check)
        self.actors[rank] = Actor(f"rank {rank}", join_hosts_and_play, *world, *self._play)
        return self.actors[rank]

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            shutil.rmtree(self.folder)


def lose_and_stay(stage: Stage, culprit: int) -> None:
    """The culprit is to be killed. The others say whom they lost, and do not close until they are told to."""
    stage.transport.all_reduce(torch.ones(8))
    if stage.rank == culprit:
        stage.tell("fault")
        stage.hear()
    try:
        stage.transport.all_reduce(torch.ones(8))
    except PeerLost as error:
        stage.tell("lost", peer=error.peer)
    stage.hear()


def join_hosts_and_play(
    pipe: Connection,
    store_file: str,
    served: bool,
    rank: int,
    hosts: Sequence[int],
    check: str,
    timeout: float,
    act: Act,
    args: Sequence[Any],
) -> None:
    """The life of a rank in a process of its own."""
    torch.set_num_threads(1)
    store = tcp_store(store_file, len(hosts), rank) if served else file_store(store_file, len(hosts))
    transport = HierarchicalTransport.join(store, rank, len(hosts), hosts=hosts, check=check, timeout=timeout)
    pipe.send(("joined", {}))
    play(pipe, transport, act, args)
