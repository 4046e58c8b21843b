"""The measurement on slow links, as the rank on every host runs it: all contestants in turn, round after round.

A *round* gives each contestant one *batch*: the ranks meet, and so many steps, a multiple of the contestant's period,
are timed together, while the interface counts. The rank asks for the next rate when it has done with the last; modules
are wrapped and warmed up before, on links as fast as the machine.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from murmura import MurmuraError, Transport
from murmura.benchmarks.ddp_checks import check_in_step
from murmura.benchmarks.ddp_measure import slowest
from murmura.benchmarks.models import Batch, Model
from murmura.benchmarks.network_contestants import (
    Contestant,
    formula_bytes,
    period,
    stays_together,
    warm_up_steps,
)

MIN_ROUNDS = 3
BATCH_SECONDS = 0.5  # about what a batch of short steps lasts
MAX_BATCH_STEPS = 10
NUM_BATCHES = 4  # of data, in rotation

Traffic = tuple[int, int]  # bytes and packets that left this host so far, as its interface counts them


@dataclass(frozen=True)
class Sample:
    """One contestant at one rate, by round: seconds of a step on the slowest rank, and what each rank sent in it."""

    contestant: str
    batch: int
    seconds: tuple[float, ...]
    sent_bytes: tuple[tuple[float, ...], ...]
    sent_packets: tuple[tuple[float, ...], ...]


class Lane:
    """A contestant with its module, its optimizer, and its place in the data."""

    def __init__(self, contestant: Contestant, recipe: Model, data: Sequence[Batch], module: torch.nn.Module) -> None:
        self.name = contestant.name
        self.module = module
        self.shapes = [parameter.shape for parameter in module.parameters()]
        self.batch = period(contestant.name)
        self._recipe = recipe
        self._data = data
        self._num_steps = 0
        self._wrapped = contestant.wrap(module)
        self._optimizer = contestant.optimizer(module)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            inputs, targets = self._data[self._num_steps % len(self._data)]
            self._wrapped.backward(self._recipe.loss(self._wrapped.forward(inputs), targets))
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._num_steps += 1

    def close(self) -> None:
        self._wrapped.close()


@dataclass(frozen=True)
class Link:
    """What the ranks know of the links of their hosts.

    Attributes:
        rates_bytes: per second, one measurement each.
        take: called on rank 0, returns when all links have the rate of that index.
        traffic: what has left this host so far.
    """

    rates_bytes: Sequence[float]
    take: Callable[[int], None]
    traffic: Callable[[], Traffic]


def measure(
    transport: Transport,
    contestants: Sequence[Contestant],
    recipe: Model,
    link: Link,
    seconds: float,
    tell: Callable[[int, float, int], None],
) -> list[list[Sample]]:
    """Measure every contestant for about `seconds` together at each rate; every rank returns the same.

    The ranks meet on `transport`, whatever the contestants use. `tell` hears which rate it is, how far it has come,
    and at its end how many rounds there were. Replicas that should be equal and are not are a `MurmuraError`.
    """
    found = []
    with contextlib.ExitStack() as closing:
        lanes = _lanes(transport, contestants, recipe, closing)
        alone = [_warm_up(transport, lane) for lane in lanes]
        for index, rate in enumerate(link.rates_bytes):
            if transport.rank == 0:
                link.take(index)
            transport.barrier()
            for lane, step_seconds in zip(lanes, alone, strict=True):
                sent = formula_bytes(lane.name, lane.shapes, transport.world_size)
                lane.batch = steps_per_batch(period(lane.name), step_seconds + sent / rate)
            found.append(_time_rounds(transport, lanes, link, seconds, lambda *how_far, at=index: tell(at, *how_far)))
        for lane in lanes:
            if stays_together(lane.name):
                check_in_step(transport, lane.module, lane.name)
        transport.barrier()  # nobody leaves while a peer may still need it
    return found


def _lanes(
    transport: Transport, contestants: Sequence[Contestant], recipe: Model, closing: contextlib.ExitStack
) -> list[Lane]:
    module = recipe.build()
    data = recipe.batches(transport.rank, NUM_BATCHES)
    lanes = []
    for contestant in contestants:
        lanes.append(Lane(contestant, recipe, data, copy.deepcopy(module)))
        closing.callback(lanes[-1].close)
    return lanes


def _warm_up(transport: Transport, lane: Lane) -> float:
    """About the seconds of a step as it will be, on the slowest rank."""
    lane.run(warm_up_steps(lane.name))
    transport.barrier()
    began = time.perf_counter()
    lane.run(lane.batch)
    return slowest(transport, time.perf_counter() - began) / lane.batch


def _time_rounds(
    transport: Transport, lanes: Sequence[Lane], link: Link, seconds: float, told: Callable[[float, int], None]
) -> list[Sample]:
    rounds: list[list[list[float]]] = []
    began = time.perf_counter()
    while (elapsed := slowest(transport, time.perf_counter() - began)) < seconds or len(rounds) < MIN_ROUNDS:
        told(min(elapsed / seconds, 0.99), 0)
        entries: list[list[float]] = [[] for _ in lanes]
        for turn in range(len(lanes)):
            place = (len(rounds) + turn) % len(lanes)  # nobody always follows the same one
            entries[place] = _time_batch(transport, lanes[place], link)
        rounds.append(entries)
    by_rank = transport.all_gather(torch.tensor(rounds, dtype=torch.float64))
    assert isinstance(by_rank, list)
    told(1.0, len(rounds))
    # By rank, round, lane and entry: the seconds, bytes and packets of a step.
    return [_sample(lane, torch.stack(by_rank)[:, :, place]) for place, lane in enumerate(lanes)]


def _time_batch(transport: Transport, lane: Lane, link: Link) -> list[float]:
    """Seconds, bytes and packets of a step, out of a batch, as this rank sees them."""
    transport.barrier()
    before, began = link.traffic(), time.perf_counter()
    lane.run(lane.batch)
    ended = time.perf_counter()
    transport.barrier()  # what was sent has arrived
    sent = [now - then for now, then in zip(link.traffic(), before, strict=True)]
    return [each / lane.batch for each in (ended - began, *sent)]


def _sample(lane: Lane, entries: Tensor) -> Sample:
    by_round = entries.transpose(0, 1)
    return Sample(
        lane.name,
        lane.batch,
        tuple(by_round[:, :, 0].amax(1).tolist()),
        tuple(tuple(each) for each in by_round[:, :, 1].tolist()),
        tuple(tuple(each) for each in by_round[:, :, 2].tolist()),
    )


def steps_per_batch(period: int, step_seconds: float) -> int:
    """How many steps of about `step_seconds` to time together."""
    return period if period > 1 else max(1, min(MAX_BATCH_STEPS, math.ceil(BATCH_SECONDS / step_seconds)))


def interface_traffic(interface: str) -> Traffic:
    """What has left this host by `interface`, with its Ethernet and IP headers."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            fields = counters.split()  # eight of what was received, then bytes and packets that were sent
            return int(fields[8]), int(fields[9])
    raise MurmuraError(f"this host has no interface {interface}, so what it sends cannot be counted.")
