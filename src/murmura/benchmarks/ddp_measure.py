"""The measurement of training steps, as every rank runs it: all contestants in turn, round after round.

A *round* gives each contestant one *batch*: the ranks meet, and so many training steps are timed together. Each
contestant has a module and an optimizer of its own, and all see the same data in the same order. The contestants take
turns inside a round, so that whatever the machine does meanwhile, it does to all of them.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from murmura import ThrottledTransport, Transport
from murmura.benchmarks.ddp_checks import check_gradients, check_in_step, expected_gradients
from murmura.benchmarks.ddp_contestants import BARE, Contestant, overlap_contestants, step_contestant, step_names
from murmura.benchmarks.ddp_spec import DDPPeer
from murmura.benchmarks.models import Batch, Model
from murmura.benchmarks.progress import Progress, ProgressFile, silent

BATCH_SECONDS = 0.15  # about what a batch lasts
BATCH_STEPS = (2, 16)
MIN_ROUNDS = 5  # fewer, and a median means nothing
TRIAL_STEPS = 3  # after the first one; in the second both DDPs plan their buckets anew
NUM_BATCHES = 8  # of data, in rotation
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Sample:
    """One contestant: the seconds of a step on the slowest rank, round by round.

    `phases` are the parts of the step in the order of `PHASES`, each as the rank slowest in it saw it; `cpu_seconds` is
    the processor time of all threads of the rank that used most.
    """

    contestant: str
    about: str
    batch: int
    seconds: tuple[float, ...]
    phases: tuple[tuple[float, ...], ...]
    cpu_seconds: tuple[float, ...]


class Lane:
    """A contestant with its module, its optimizer, and its place in the data."""

    def __init__(self, contestant: Contestant, recipe: Model, module: nn.Module, data: Sequence[Batch]) -> None:
        self.contestant = contestant
        self.module = module
        self._recipe = recipe
        self._data = data
        self._optimizer = recipe.optimizer(module)
        self._num_steps = 0
        self._wrapped = contestant.wrap(module)

    def differentiate(self) -> tuple[float, float]:
        """Forward and backward on the next batch of data; the times at which they ended."""
        inputs, targets = self._data[self._num_steps % len(self._data)]
        loss = self._recipe.loss(self._wrapped.forward(inputs), targets)
        forward = time.perf_counter()
        self._wrapped.backward(loss)
        return forward, time.perf_counter()

    def finish_step(self) -> None:
        """The optimizer's part of a step."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._num_steps += 1

    def time_steps(self, count: int) -> list[float]:
        """Seconds of a step, out of `count`: the whole, each phase, and the processor time; as this rank sees them."""
        spent = [0.0] * len(PHASES)
        cpu_started = time.process_time()
        started = began = time.perf_counter()
        for _ in range(count):
            forward, backward = self.differentiate()
            self.finish_step()
            ended = time.perf_counter()
            for phase, seconds in enumerate((forward - began, backward - forward, ended - backward)):
                spent[phase] += seconds
            began = ended
        cpu = time.process_time() - cpu_started
        return [each / count for each in (began - started, *spent, cpu)]

    def close(self) -> None:
        self._wrapped.close()


def measure_steps(
    transport: Transport, recipe: Model, peers: tuple[DDPPeer, ...], seconds: float, index: int, folder: Path
) -> list[Sample]:
    """All contestants of an ordinary step, in a process that exists for this alone; every rank returns the same."""
    torch.set_num_threads(1)
    names = step_names(peers, transport.world_size)
    contestants = [step_contestant(name, transport, folder) for name in names]
    return measure(transport, contestants, recipe, seconds, index, _teller(transport, folder))


def measure_slow_link(
    transport: Transport, recipe: Model, bandwidth: str, seconds: float, index: int, folder: Path
) -> list[Sample]:
    """murmura over a link of `bandwidth`, against itself without overlap; otherwise as `measure_steps`."""
    torch.set_num_threads(1)
    with ThrottledTransport(transport.channel("slow link"), bandwidth) as link:
        return measure(transport, overlap_contestants(link), recipe, seconds, index, _teller(transport, folder))


def _teller(transport: Transport, folder: Path) -> Callable[[Progress], None]:
    return ProgressFile(folder.parent / "progress") if transport.rank == 0 else silent


def measure(
    transport: Transport,
    contestants: Sequence[Contestant],
    recipe: Model,
    seconds: float,
    index: int = 0,
    tell: Callable[[Progress], None] = silent,
) -> list[Sample]:
    """Measure every contestant for about `seconds` together; one with a wrong gradient is a `MurmuraError`.

    The ranks meet on `transport`, whatever the contestants use. Progress is told as that of stage `index`.
    """
    num_bytes = recipe.num_bytes()

    def told(fraction: float, rounds: int = 0) -> None:
        tell(Progress(index, num_bytes, fraction, rounds))

    told(0.0)
    with contextlib.ExitStack() as closing:
        lanes = _lanes(transport, contestants, recipe, closing)
        steps, times = _time_rounds(transport, lanes, seconds, told)
        for lane in lanes:
            if lane.contestant.averages:
                check_in_step(transport, lane.module, lane.contestant.name)
        transport.barrier()  # nobody leaves while a peer may still need it
    told(1.0, len(times))
    return [
        Sample(
            lane.contestant.name,
            lane.contestant.about,
            steps,
            tuple(times[:, place, 0].tolist()),
            tuple(tuple(times[:, place, 1 + phase].tolist()) for phase in range(len(PHASES))),
            tuple(times[:, place, -1].tolist()),
        )
        for place, lane in enumerate(lanes)
    ]


def _time_rounds(
    transport: Transport, lanes: Sequence[Lane], seconds: float, told: Callable[[float], None]
) -> tuple[int, Tensor]:
    """The number of steps in a batch, and the slowest rank's seconds by round, lane, and entry of `time_steps`."""
    steps = num_per_batch(min(_warm_up(transport, lane) for lane in lanes))
    rounds: list[list[list[float]]] = []
    started = time.perf_counter()
    while (elapsed := slowest(transport, time.perf_counter() - started)) < seconds or len(rounds) < MIN_ROUNDS:
        told(min(elapsed / seconds, len(rounds) / MIN_ROUNDS, 0.99))
        rounds.append(_run_round(transport, lanes, len(rounds), steps))
    times = torch.tensor(rounds, dtype=torch.float64)
    transport.all_reduce(times, "max")
    return steps, times


def _lanes(
    transport: Transport, contestants: Sequence[Contestant], recipe: Model, closing: contextlib.ExitStack
) -> list[Lane]:
    """One lane a contestant, its first gradients checked and its first step taken."""
    module = recipe.build()
    data = recipe.batches(transport.rank, NUM_BATCHES)
    local, mean = expected_gradients(transport, recipe, module, data[0])
    lanes = []
    for contestant in contestants:
        lane = Lane(contestant, recipe, copy.deepcopy(module), data)
        closing.callback(lane.close)
        lane.differentiate()
        check_gradients(lane.module, mean if contestant.averages else local, contestant.name)
        lane.finish_step()
        lanes.append(lane)
    return lanes


def _warm_up(transport: Transport, lane: Lane) -> float:
    """About the seconds of a step, on the slowest rank."""
    transport.barrier()
    return slowest(transport, min(lane.time_steps(1)[0] for _ in range(TRIAL_STEPS)))


def _run_round(transport: Transport, lanes: Sequence[Lane], number: int, steps: int) -> list[list[float]]:
    """What `time_steps` says of each lane in round `number`."""
    times: list[list[float]] = [[] for _ in lanes]
    for turn in range(len(lanes)):
        place = (number + turn) % len(lanes)  # nobody always follows the same one
        transport.barrier()
        times[place] = lanes[place].time_steps(steps)
    return times


def slowest(transport: Transport, seconds: float) -> float:
    """The largest `seconds` of any rank, on every rank: what follows from them must be the same everywhere."""
    told = torch.tensor([seconds], dtype=torch.float64)
    transport.all_reduce(told, "max")
    return told.item()


# Plain arithmetic


def num_per_batch(step_seconds: float) -> int:
    """How many steps of `step_seconds` each to time together."""
    fewest, most = BATCH_STEPS
    return max(fewest, min(most, int(BATCH_SECONDS / step_seconds)))


def backward_seconds(samples: Sequence[Sample]) -> float:
    """What backward takes without communication."""
    bare = next(sample for sample in samples if sample.contestant == BARE)
    return statistics.median(bare.phases[PHASES.index("backward")])


def matching_bandwidth(num_bytes: int, world_size: int, seconds: float) -> str:
    """The rate at which a ring takes `seconds` to all-reduce so many bytes: 2 (n - 1) / n of them leave each rank."""
    sent_bytes = 2 * (world_size - 1) / world_size * num_bytes
    return f"{8 * sent_bytes / seconds / 1e6:.3f}mbit"
