"""Who competes in an all-reduce (sum of float32, in place), and what one batch of it is.

The buffers of a batch are written by their owner, the ranks meet, and so many all-reduces, each on its own buffer, are
timed together. All that can be done once for a buffer is done before: only the all-reduce itself is timed.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor

from murmura import MurmuraError, Transport, __version__
from murmura.errors import ConfigError
from murmura.tools.bench.buffers import ELEMENT_BYTES, most_per_batch, num_buffers
from murmura.tools.bench.harness import Contestant, slowest
from murmura.tools.bench.sizes import format_size
from murmura.tools.experiments.process_groups import LOOPBACK, gloo_backend

ALLOCATED = "murmura allocated"
ANY_TENSOR = "murmura any tensor"
MURMURA = (ALLOCATED, ANY_TENSOR)
BATCH_SECONDS = 0.02  # a slow contestant gets shorter batches, so that there are many rounds for all
TRIAL_OPERATIONS = 8
BARRIERS = 2  # the first wakes those who slept while others wrote; after the second all start together
PATTERN = 97  # a prime, so that no chunk of any rank looks like another


class Peer(StrEnum):
    """Whom murmura can be measured against."""

    GLOO = "gloo"
    MPICH = "mpich"


@dataclass(frozen=True)
class Method:
    """One way to all-reduce; see `Contestant` for `name` and `about`.

    Attributes:
        bind: makes the call that reduces a buffer; the buffer must outlive the call.
        allocated: whether its buffers come from ``Transport.allocate``.
    """

    name: str
    about: str
    bind: Callable[[Tensor], Callable[[], object]]
    allocated: bool = False


def methods_of(peers: Sequence[Peer], transport: Transport, folder: Path) -> list[Method]:
    """murmura and its peers, connected; called by every rank. `folder` is shared."""
    found = murmura_methods(transport)
    if Peer.GLOO in peers:
        found.append(gloo(transport, folder / "gloo"))
    if Peer.MPICH in peers:
        found.append(mpich(transport))
    return found


def murmura_methods(transport: Transport) -> list[Method]:
    """murmura twice: on memory of its own, and on tensors that happen to be anywhere."""

    def bind(buffer: Tensor) -> Callable[[], object]:
        return functools.partial(transport.all_reduce, buffer)

    about = f"murmura {__version__}, {type(transport).__name__}"
    return [
        Method(ALLOCATED, f"{about}, tensors from allocate()", bind, allocated=True),
        Method(ANY_TENSOR, f"{about}, ordinary tensors", bind),
    ]


def gloo(transport: Transport, store_file: Path) -> Method:
    """torch.distributed's Gloo, as a process group of its own: the default group stays untouched."""
    group = gloo_backend(transport, store_file)
    sum_of = torch.distributed.AllreduceOptions()

    def bind(buffer: Tensor) -> Callable[[], object]:
        tensors = [buffer]
        return lambda: group.allreduce(tensors, sum_of).wait()

    return Method(Peer.GLOO, f"ProcessGroupGloo of torch {torch.__version__}, TCP on {LOOPBACK}", bind)


def mpich(transport: Transport) -> Method:
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
    return Method(Peer.MPICH, about, bind)


class AllReduce(Contestant):
    """A method with its buffers of one size, which are used in rotation."""

    def __init__(self, method: Method, transport: Transport, buffers: Sequence[Tensor]) -> None:
        super().__init__(method.name, method.about)
        self._transport = transport
        self._buffers = buffers
        self._calls = [method.bind(buffer) for buffer in buffers]

    def run_batch(self, number: int) -> list[float]:
        picked = [(number * self.batch + step) % len(self._buffers) for step in range(self.batch)]
        for index in picked:
            self._buffers[index].fill_(self._transport.rank + 1)
        calls = [self._calls[index] for index in picked]
        for _ in range(BARRIERS):
            self._transport.barrier()
        began = time.perf_counter()
        for call in calls:
            call()
        return [(time.perf_counter() - began) / len(calls)]

    def warm_up(self) -> float:
        """Check the first sum, use each buffer once, and return about the seconds of an all-reduce."""
        buffer, transport = self._buffers[0], self._transport
        buffer.copy_(pattern(buffer.numel(), transport.rank))
        self._calls[0]()
        check_sum(buffer, transport.world_size, self.name)
        for call in self._calls[1:]:
            call()
        transport.barrier()
        trials = []
        for call in self._calls[:TRIAL_OPERATIONS]:
            began = time.perf_counter()
            call()
            trials.append(time.perf_counter() - began)
        return slowest(transport, statistics.median(trials))


def prepare(transport: Transport, methods: Sequence[Method], size_bytes: int) -> list[AllReduce]:
    """The contestants of one size, warmed up; those that take any tensor share their buffers."""
    numel, count = size_bytes // ELEMENT_BYTES, num_buffers(size_bytes)
    allocated = [transport.allocate(numel) for _ in range(count)]
    ordinary = [torch.zeros(numel) for _ in range(count)]
    contestants = [AllReduce(each, transport, allocated if each.allocated else ordinary) for each in methods]
    for contestant in contestants:
        contestant.batch = num_per_batch(size_bytes, contestant.warm_up())
    return contestants


# Plain arithmetic


def num_per_batch(size_bytes: int, op_seconds: float) -> int:
    """How many all-reduces of `op_seconds` each to time together: as many as a short while holds."""
    return max(1, min(most_per_batch(size_bytes), int(BATCH_SECONDS / op_seconds)))


def pattern(numel: int, rank: int) -> Tensor:
    """What `rank` contributes to the first sum: whole numbers, whose sum float32 holds exactly."""
    return torch.arange(numel, dtype=torch.int32).remainder_(PATTERN).add_(rank).to(torch.float32)


def check_sum(result: Tensor, world_size: int, name: str) -> None:
    """Raise a `MurmuraError` unless `result` is the exact sum of every rank's `pattern`."""
    expected = pattern(result.numel(), 0).mul_(world_size).add_(world_size * (world_size - 1) // 2)
    if torch.equal(result, expected):
        return
    wrong = torch.nonzero(result != expected).flatten()
    at = int(wrong[0])
    raise MurmuraError(
        f"{name} sums wrongly: {format_size(result.nbytes)} on {world_size} ranks, {len(wrong)} of {len(result)} "
        f"elements, the first at {at}: {result[at]:g} instead of {expected[at]:g}. There is nothing to measure."
    )
