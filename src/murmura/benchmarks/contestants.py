"""Who competes: each contestant turns a buffer into a call that all-reduces it (sum of float32, in place).

All that can be done once for a buffer is done before the call: a contestant is timed for its all-reduce alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor

from murmura import Transport, __version__
from murmura.benchmarks.spec import AllReduceSpec, Peer
from murmura.errors import ConfigError

ALLOCATED = "murmura allocated"
ANY_TENSOR = "murmura any tensor"
MURMURA = (ALLOCATED, ANY_TENSOR)
GLOO_HOST = "127.0.0.1"  # ranks are on one host, so no port is opened to the network


@dataclass(frozen=True)
class Contestant:
    """One way to all-reduce.

    Attributes:
        name: as the report has it.
        about: what it is, with versions.
        bind: makes the call for a buffer; the buffer must outlive the call.
        allocated: whether its buffers come from ``Transport.allocate``.
    """

    name: str
    about: str
    bind: Callable[[Tensor], Callable[[], object]]
    allocated: bool = False


def contestants_of(spec: AllReduceSpec, transport: Transport, folder: Path) -> list[Contestant]:
    """All contestants of `spec`, connected; called by every rank. `folder` is shared and starts empty."""
    found = murmura_contestants(transport)
    if Peer.GLOO in spec.peers:
        found.append(gloo(transport, folder / "gloo"))
    if Peer.MPICH in spec.peers:
        found.append(mpich(transport))
    return found


def murmura_contestants(transport: Transport) -> list[Contestant]:
    """murmura twice: on memory of its own, and on tensors that happen to be anywhere."""

    def bind(buffer: Tensor) -> Callable[[], object]:
        return functools.partial(transport.all_reduce, buffer)

    about = f"murmura {__version__}, {type(transport).__name__}"
    return [
        Contestant(ALLOCATED, f"{about}, tensors from allocate()", bind, allocated=True),
        Contestant(ANY_TENSOR, f"{about}, ordinary tensors", bind),
    ]


def gloo(transport: Transport, meeting_file: Path) -> Contestant:
    """torch.distributed's Gloo, as a process group of its own: the default group stays untouched."""
    import torch.distributed

    c10d: Any = torch.distributed  # its stubs know nothing of options and operations of a bare process group
    store = c10d.FileStore(str(meeting_file), transport.world_size)
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=GLOO_HOST)]
    options._timeout = timedelta(seconds=transport.timeout)
    group = c10d.ProcessGroupGloo(store, transport.rank, transport.world_size, options)
    sum_of = c10d.AllreduceOptions()

    def bind(buffer: Tensor) -> Callable[[], object]:
        tensors = [buffer]
        return lambda: group.allreduce(tensors, sum_of).wait()

    return Contestant(Peer.GLOO, f"ProcessGroupGloo of torch {torch.__version__}, TCP on {GLOO_HOST}", bind)


def mpich(transport: Transport) -> Contestant:
    """MPI's Allreduce through mpi4py, on the ranks that mpiexec started, as mpi4py initialises it."""
    import mpi4py
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    world = MPI.COMM_WORLD
    if vendor != "MPICH" or (world.rank, world.size) != (transport.rank, transport.world_size):
        raise ConfigError(
            f"mpi4py found {vendor} and is rank {world.rank} of {world.size}, murmura is rank {transport.rank} of "
            f"{transport.world_size}. mpiexec and mpi4py must both be MPICH's: pip install 'murmura[mpi]'."
        )
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }

    def bind(buffer: Tensor) -> Callable[[], object]:
        return functools.partial(world.Allreduce, MPI.IN_PLACE, [buffer.numpy(), MPI.FLOAT])

    about = (
        f"MPICH {'.'.join(map(str, version))} through mpi4py {mpi4py.__version__}, "
        f"thread level {levels[MPI.Query_thread()]}"
    )
    return Contestant(Peer.MPICH, about, bind)
