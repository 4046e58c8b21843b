"""The measurement itself, as every rank runs it: all contestants in turn, round after round.

A *round* gives each contestant one *batch*: the buffers of the batch are written by their owner, the ranks meet, and
so many all-reduces, each on its own buffer, are timed together. Buffers are used in rotation. The contestants take
turns inside a round, so that whatever the machine does meanwhile, it does to all of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from murmura import MurmuraError, Transport
from murmura.benchmarks.contestants import Contestant, contestants_of
from murmura.benchmarks.progress import Progress, ProgressFile, silent
from murmura.benchmarks.sizes import format_size
from murmura.benchmarks.spec import ELEMENT_BYTES, AllReduceSpec, most_per_batch, num_buffers

BATCH_SECONDS = 0.02  # a slow contestant gets shorter batches, so that there are many rounds for all
MIN_ROUNDS = 5  # fewer, and a median means nothing
TRIAL_OPERATIONS = 8
BARRIERS = 2  # the first wakes those who slept while others wrote; after the second all start together
PATTERN = 97  # a prime, so that no chunk of any rank looks like another


@dataclass(frozen=True)
class Sample:
    """One contestant at one size: the seconds of an all-reduce on the slowest rank, round by round."""

    size_bytes: int
    contestant: str
    batch: int
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Measurement:
    """All samples of a run, and what the contestants were, by name."""

    about: dict[str, str]
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Lane:
    """A contestant with its buffers of one size, and the call that reduces each of them."""

    contestant: Contestant
    buffers: Sequence[Tensor]
    calls: Sequence[Callable[[], object]]
    batch: int = 1

    def picked(self, number: int) -> list[int]:
        """The buffers of round `number`: the next ones in rotation."""
        return [(number * self.batch + step) % len(self.buffers) for step in range(self.batch)]


def measure_as_rank(transport: Transport, spec: AllReduceSpec, folder: Path) -> Measurement:
    """Measure `spec` in a process that exists for this alone; every rank returns the same."""
    torch.set_num_threads(1)
    gc.disable()
    tell = ProgressFile(folder / "progress") if transport.rank == 0 else silent
    return measure(transport, contestants_of(spec, transport, folder), spec.sizes_bytes, spec.seconds, tell)


def measure(
    transport: Transport,
    contestants: Sequence[Contestant],
    sizes_bytes: Sequence[int],
    seconds: float,
    tell: Callable[[Progress], None] = silent,
) -> Measurement:
    """Measure every contestant at every size, about `seconds` a size; a wrong sum is a `MurmuraError`."""
    samples: list[Sample] = []
    for index, size in enumerate(sizes_bytes):

        def tell_size(fraction: float, rounds: int, index: int = index, size: int = size) -> None:
            tell(Progress(index, size, fraction, rounds))

        samples += _measure_size(transport, contestants, size, seconds, tell_size)
    transport.barrier()  # nobody leaves while a peer may still need it
    return Measurement({contestant.name: contestant.about for contestant in contestants}, tuple(samples))


def _measure_size(
    transport: Transport,
    contestants: Sequence[Contestant],
    size_bytes: int,
    seconds: float,
    tell: Callable[[float, int], None],
) -> list[Sample]:
    tell(0.0, 0)
    lanes = []
    for lane in _lanes(transport, contestants, size_bytes):
        op_seconds = _agreed(transport, _warm_up(transport, lane))
        lanes.append(replace(lane, batch=num_per_batch(size_bytes, op_seconds)))
        tell(0.0, 0)
    rounds: list[list[float]] = []
    started = time.perf_counter()
    while (elapsed := _agreed(transport, time.perf_counter() - started)) < seconds or len(rounds) < MIN_ROUNDS:
        tell(min(elapsed / seconds, len(rounds) / MIN_ROUNDS, 0.99), 0)
        rounds.append(_run_round(transport, lanes, len(rounds)))
    times = torch.tensor(rounds, dtype=torch.float64)
    transport.all_reduce(times, "max")
    tell(1.0, len(rounds))
    return [
        Sample(size_bytes, lane.contestant.name, lane.batch, tuple(times[:, place].tolist()))
        for place, lane in enumerate(lanes)
    ]


def _lanes(transport: Transport, contestants: Sequence[Contestant], size_bytes: int) -> list[Lane]:
    """One lane a contestant; those that take any tensor share their buffers."""
    numel, count = size_bytes // ELEMENT_BYTES, num_buffers(size_bytes)
    allocated = [transport.allocate(numel) for _ in range(count)]
    ordinary = [torch.zeros(numel) for _ in range(count)]
    lanes = []
    for contestant in contestants:
        buffers = allocated if contestant.allocated else ordinary
        lanes.append(Lane(contestant, buffers, [contestant.bind(buffer) for buffer in buffers]))
    return lanes


def _warm_up(transport: Transport, lane: Lane) -> float:
    """Check the first sum, use each buffer once, and return about the seconds of an all-reduce."""
    buffer, *_ = lane.buffers
    buffer.copy_(pattern(buffer.numel(), transport.rank))
    lane.calls[0]()
    check_sum(buffer, transport.world_size, lane.contestant.name)
    for call in lane.calls[1:]:
        call()
    transport.barrier()
    trials = []
    for call in lane.calls[:TRIAL_OPERATIONS]:
        started = time.perf_counter()
        call()
        trials.append(time.perf_counter() - started)
    return statistics.median(trials)


def _run_round(transport: Transport, lanes: Sequence[Lane], number: int) -> list[float]:
    """What `_time_batch` says of each lane in round `number`."""
    times = [0.0] * len(lanes)
    for turn in range(len(lanes)):
        place = (number + turn) % len(lanes)  # nobody always follows the same one
        times[place] = _time_batch(transport, lanes[place], number)
    return times


def _time_batch(transport: Transport, lane: Lane, number: int) -> float:
    """The seconds of one all-reduce, out of a batch, as this rank sees them."""
    picked = lane.picked(number)
    for index in picked:
        lane.buffers[index].fill_(transport.rank + 1)
    calls = [lane.calls[index] for index in picked]
    for _ in range(BARRIERS):
        transport.barrier()
    started = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - started) / len(calls)


def _agreed(transport: Transport, seconds: float) -> float:
    """Rank 0's `seconds`, on every rank: what follows from them must be the same everywhere."""
    told = torch.tensor([seconds], dtype=torch.float64)
    transport.broadcast(told)
    return told.item()


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
