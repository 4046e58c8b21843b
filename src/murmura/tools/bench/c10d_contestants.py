"""Who competes in the benchmark of the torch.distributed backend: calls of torch.distributed, and training steps.

Buffers take turns, and are written by their owner before each batch; only the calls themselves are timed.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from murmura import MurmuraError, Transport, __version__
from murmura.tools.bench.buffers import ELEMENT_BYTES, most_per_batch, num_buffers
from murmura.tools.bench.harness import Contestant, slowest
from murmura.tools.bench.models import MLP
from murmura.tools.bench.steps import Method, TrainingStep, Wrapped, bare, prepare

MURMURA, NEW, ALLOCATED, GLOO, BARE = "murmura", "murmura new tensors", "murmura allocated", "gloo", "bare"
OPERATIONS = ("all_reduce", "all_reduce async", "all_gather_into_tensor", "reduce_scatter_tensor")
BATCH_SECONDS = 0.02
TRIALS = 4
NUM_PLACES, PLACE_ELEMENTS = 4096, 16  # where in their memory new tensors can begin: at every 64 bytes, as torch's do
Groups = dict[str, Any]
Bound = tuple[Sequence[Callable[[], Any]], Sequence[Tensor]]  # the calls, and the buffers that their owner writes


def about(name: str) -> str:
    if name == GLOO:
        return f"the backend gloo of torch {torch.__version__}"
    tensors = {
        NEW: "ordinary tensors, in each batch others than before",
        ALLOCATED: "tensors from allocate_tensor(), used again and again",
    }
    told = tensors.get(name, "ordinary tensors, used again and again")
    return f"the backend murmura {__version__} on torch {torch.__version__}, {told}"


class Calls(Contestant):
    """One call of torch.distributed, each time on the next buffers; `bind` makes them, anew for each batch of NEW."""

    def __init__(self, name: str, transport: Transport, bind: Callable[[], Bound]) -> None:
        super().__init__(name, about(name))
        self._transport, self._bind = transport, bind
        self._calls, self._buffers = bind()

    def run_batch(self, number: int) -> list[float]:
        if self.name == NEW:
            self._calls, self._buffers = self._bind()
        picked = [(number * self.batch + step) % len(self._calls) for step in range(self.batch)]
        for index in picked:
            self._buffers[index].fill_(self._transport.rank + 1)
        calls = [self._calls[index] for index in picked]
        self._transport.barrier()
        self._transport.barrier()
        began = time.perf_counter()
        for call in calls:
            call()
        return [(time.perf_counter() - began) / len(calls)]

    def warm_up(self, size_bytes: int) -> None:
        """Use each buffer once, and choose how many calls to time together."""
        for call in self._calls:
            call()
        trials = []
        for call in self._calls[:TRIALS]:
            self._transport.barrier()
            began = time.perf_counter()
            call()
            trials.append(time.perf_counter() - began)
        seconds = slowest(self._transport, statistics.median(trials))
        self.batch = max(1, min(most_per_batch(size_bytes), int(BATCH_SECONDS / seconds)))


def prepare_calls(transport: Transport, groups: Groups, operation: str, size_bytes: int) -> list[Contestant]:
    """Gloo, murmura, murmura on tensors it has not seen and on memory of its own, warmed up and checked."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch renames its collectives
    numel, count = size_bytes // ELEMENT_BYTES, num_buffers(size_bytes)
    contestants: list[Contestant] = []
    for name in (MURMURA, NEW, ALLOCATED, GLOO):
        group = groups[GLOO if name == GLOO else MURMURA]

        def make(length: int, group: Any = group, name: str = name) -> Tensor:
            if name == ALLOCATED:
                return torch.Tensor(group.allocate_tensor(length, dtype=torch.float32)).fill_(0)
            return torch.zeros(length)

        lengths = numel, numel // transport.world_size
        places = NUM_PLACES if name == NEW else 1
        pool = [[make(length + (places - 1) * PLACE_ELEMENTS) for _ in range(count)] for length in lengths]
        wholes, parts = _cut(pool, lengths, 0)
        _check(transport, operation, name, _bind(operation, group, wholes[0], parts[0]), wholes[0], parts[0])
        contestant = Calls(name, transport, _binder(operation, group, pool, lengths, places))
        contestant.warm_up(size_bytes)
        contestants.append(contestant)
    return contestants


def _cut(pool: list[list[Tensor]], lengths: Sequence[int], place: int) -> list[list[Tensor]]:
    start = place * PLACE_ELEMENTS
    return [[each[start : start + length] for each in of_kind] for of_kind, length in zip(pool, lengths, strict=True)]


def _binder(
    operation: str, group: Any, pool: list[list[Tensor]], lengths: Sequence[int], places: int
) -> Callable[[], Bound]:
    """What binds calls to the tensors of a pool, each time at the next of the `places` where they can begin.

    The backend knows a tensor by its address and length, and torch gives memory that was freed to the next tensor.
    """
    numbers = itertools.cycle(range(places))

    def bind() -> Bound:
        wholes, parts = _cut(pool, lengths, next(numbers))
        calls = [_bind(operation, group, *each) for each in zip(wholes, parts, strict=True)]
        return calls, parts if operation == "all_gather_into_tensor" else wholes

    return bind


def _bind(operation: str, group: Any, whole: Tensor, part: Tensor) -> Callable[[], Any]:
    if operation == "all_reduce":
        return functools.partial(dist.all_reduce, whole, group=group)
    if operation == "all_reduce async":
        return lambda: dist.all_reduce(whole, group=group, async_op=True).wait()
    if operation == "all_gather_into_tensor":
        return functools.partial(dist.all_gather_into_tensor, whole, part, group=group)
    return functools.partial(dist.reduce_scatter_tensor, part, whole, group=group)


def _check(
    transport: Transport, operation: str, name: str, call: Callable[[], Any], whole: Tensor, part: Tensor
) -> None:
    """Raise a `MurmuraError` unless the first call gives the right numbers."""
    size, rank = transport.world_size, transport.rank
    whole.copy_(torch.arange(whole.numel()).remainder(97).add(rank))
    part.fill_(rank)
    call()
    if operation == "all_gather_into_tensor":
        wanted, came = torch.arange(size).repeat_interleave(part.numel()).float(), whole
    else:
        total = torch.arange(whole.numel()).remainder(97).mul(size).add(size * (size - 1) // 2).float()
        wanted, came = (total, whole) if operation.startswith("all_reduce") else (total.chunk(size)[rank], part)
    if not torch.equal(came, wanted):
        raise MurmuraError(f"{operation} of {name} gives wrong numbers on rank {rank}. There is nothing to measure.")


def prepare_steps(transport: Transport, groups: Groups, operation: str, batch: int) -> list[Contestant]:
    """The same MLP of 25 MiB under torch's own DDP or FSDP2, on both groups, and alone; each has taken three steps."""
    wrap = _ddp if operation == "DDP step" else _fsdp2
    methods = [
        Method(name, f"{operation} on {about(name)}", functools.partial(wrap, groups[name])) for name in (MURMURA, GLOO)
    ]
    steps: list[TrainingStep] = prepare(transport, [*methods, bare(BARE)], MLP(batch=batch, momentum=0.0))
    for step in steps:
        step.batch = 3
        step.run_batch(0)
    return list(steps)


def _ddp(group: Any, module: nn.Module) -> Wrapped:
    return Wrapped(nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True))


def _fsdp2(group: Any, module: nn.Module) -> Wrapped:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in module.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return Wrapped(module)
