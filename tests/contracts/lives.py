"""What may happen to a run, in combinations: to its model, its gradients, its life, on so many ranks and hosts.

A `Case` is one combination: `live` runs it on a rank, `check` holds it to the simulation. `pairwise` chooses cases in
which any two values of two axes meet. All of it stands at the top level, so that processes can import it.
"""

from __future__ import annotations

import copy
import functools
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from contracts.catalogue import EVERYTHING, FAMILY, Entry
from contracts.grids import SIZES
from contracts.test_algorithms_models import half_frozen, heads, normalised
from contracts.test_algorithms_state import backwards, save
from contracts.training import Run, assert_close, by_step, momentum, perceptron, spread
from ddp.models import values
from murmura import DDP, Algorithm, DecentralizedAlgorithm, GradientAllReduceAlgorithm, Transport
from oracles.algorithms.gradients import AllReduce, QAdam
from oracles.algorithms.lives import ForgetsSkipped, Joined, QAdamUntil, Switched, Unscaled
from oracles.algorithms.simulation import Rule, Task, flat_of, simulate
from oracles.algorithms.weights import Decentralized

STEPS = 6
COMES, GOES = 3, 4  # the rounds before which an algorithm takes over, and is left or resumed; QAdam's warm-up has three
SCALE = 2.0**8
OVERFLOWS = {1: -1, 4: 0}  # under a GradScaler: by round, the rank whose gradients overflow

AXES: dict[str, Sequence[Any]] = {
    "name": FAMILY,
    "model": ("plain", "frozen", "unused", "batch_norm", "planned_anew"),
    "gradients": ("whole", "accumulated", "clipped"),
    "life": ("straight", "resumed", "switched_to", "switched_from", "joined", "scaled"),
    "size": SIZES,
    "hosts": ("one", "two"),
}
IMPOSSIBLE = {("size", 1), ("hosts", "two")}


class Case(NamedTuple):
    name: str
    model: str
    gradients: str
    life: str
    size: int
    hosts: str

    @property
    def entry(self) -> Entry:
        return next(each for each in EVERYTHING if each.name == self.name)

    @property
    def is_qadam(self) -> bool:
        return self.entry.optimizer is not None

    @property
    def has_votes(self) -> bool:
        """Whether gradients become votes, which have no scale."""
        return self.name == "majority_vote" and self.size > 1

    @property
    def within(self) -> float:
        """How near the simulation must be on threads: to the bit where it does the same operations in the same order.

        Of topk, what a host of three ranks sends is multiplied and added without rounding in between. Weights that
        decentralized averages, before a switch, are x + (mean - x).
        """
        is_fused = self.name == "topk" and self.places().count(0) == 3 and self.hosts == "two"
        follows_averages = self.life == "switched_to" and not self.is_qadam
        return 0.0 if self.entry.is_exact and not is_fused and not follows_averages else 1e-9

    def places(self) -> list[int]:
        """The host of each rank."""
        return [rank % 2 if self.hosts == "two" else 0 for rank in range(self.size)]

    def lengths(self) -> list[int]:
        """How many batches each rank has."""
        return [STEPS - 2 * (rank % 2) * (self.life == "joined") for rank in range(self.size)]

    def skips(self) -> list[tuple[int, int]]:
        """The (round, rank) that take no step: all ranks, where they share their steps."""
        if self.life != "scaled":
            return []
        found = [(number, rank % self.size) for number, rank in OVERFLOWS.items()]
        return [(number, rank) for number, _ in found for rank in range(self.size)] if self.entry.lockstep else found

    def task(self) -> Task:
        return self.entry.fit(
            Task(
                MODELS[self.model],
                momentum,
                functools.partial(shard_of, self),
                loss_of,
                accumulate=3 if self.gradients == "accumulated" else 1,
                clip=0.05 if self.gradients == "clipped" else 0.0,
            )
        )

    def algorithms(self) -> tuple[Algorithm, Algorithm | None, int]:
        """The one that the run begins with, the one that follows, and from which round on."""
        own = self.entry.make()
        if self.life == "switched_from":
            return own, GradientAllReduceAlgorithm(), GOES
        if self.life == "switched_to":
            first = GradientAllReduceAlgorithm() if self.is_qadam else DecentralizedAlgorithm(False, "shift_one")
            return first, own, COMES
        return own, None, STEPS

    def rule(self, runs: Sequence[Run]) -> Rule:
        own = self.entry.rule(runs)
        if self.life == "joined":
            return Joined(own, self.lengths())
        if self.life == "scaled":
            return ForgetsSkipped(own) if not self.has_votes else Unscaled(own, SCALE)
        if self.life == "switched_from" and self.is_qadam:
            assert isinstance(own, QAdam)
            return QAdamUntil(own, GOES)
        if self.life == "switched_from":
            return Switched(own, GOES, AllReduce())
        if self.life == "switched_to" and not self.is_qadam:  # whose warm-up is as all-reduce
            return Switched(Decentralized("shift_one"), COMES, own)
        return own

    def __str__(self) -> str:
        return "-".join(map(str, self))


def planned_anew() -> nn.Module:
    """Gradients come in another order than the first plan has them."""
    return backwards().double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": perceptron,
    "frozen": half_frozen,
    "unused": heads,
    "batch_norm": normalised,
    "planned_anew": planned_anew,
}


def shard_of(case: Case, number: int, micro: int, rank: int) -> tuple[Tensor, Tensor, list[int] | None, float]:
    """Inputs, targets, which heads are used, and a factor of the loss.

    Head 0 is used by everybody, 1 by each rank in turn, 2 by the last rank alone, and 3 by nobody.
    """
    length = case.lengths()[rank]
    seen = min(number, length - 1)
    seed, width = 10_000 * seen + 100 * micro + rank, 5 if case.model == "unused" else 3
    inputs, targets = (values(4, n, seed=seed + n, dtype=torch.float64) for n in (5, width))
    use = [0] + [1] * (seen % case.size == rank) + [2] * (rank == case.size - 1)
    overflows = case.life == "scaled" and number in OVERFLOWS and OVERFLOWS[number] % case.size == rank
    factor = 0.0 if number >= length else torch.inf if overflows else 1.0
    return inputs, targets + rank, use if case.model == "unused" else None, factor


def loss_of(model: nn.Module, shard: tuple[Tensor, Tensor, list[int] | None, float]) -> Tensor:
    inputs, targets, use, factor = shard
    outputs = model(inputs) if use is None else model(inputs, use=use)
    return factor * ((outputs - targets) ** 2).mean()


# On a rank


def live(transport: Transport, case: Case) -> Run:
    """What a rank of the case sees; `observed` has the flats of the resumed run, if there is one."""
    task, run = case.task(), Run()
    first, then, turn = case.algorithms()
    ddp = DDP(task.make_model(), transport, algorithm=first, bucket_size_bytes=bucket_bytes(case))
    optimizer = task.make_optimizer(ddp.parameters())
    saved: dict[str, Any] = {}
    numbers: Iterable[int] = range(case.lengths()[transport.rank])
    for count, number in enumerate(ddp.join(numbers) if case.life == "joined" else numbers):
        if count == turn and then is not None:
            ddp.set_algorithm(then)
        if count == GOES and case.life == "resumed":
            saved = save(ddp, optimizer)
        run.layouts.append([list(bucket.names) for bucket in ddp._replica.buckets])
        one_round(case, task, ddp, optimizer, number)
        run.flats.append(flat_of(ddp.module))
    ddp.close()
    if saved:
        run.observed = go_on(transport, case, task, saved)
    return run


def go_on(transport: Transport, case: Case, task: Task, saved: Mapping[str, Any]) -> list[Tensor]:
    ddp = DDP(task.make_model(), transport, algorithm=case.entry.make(), bucket_size_bytes=bucket_bytes(case))
    optimizer = task.make_optimizer(ddp.parameters())
    ddp.load_state_dict(saved["model"])
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    ddp.load_algorithm_state_dict(saved["algorithm"])
    flats = []
    for number in range(GOES, STEPS):
        one_round(case, task, ddp, optimizer, number)
        flats.append(flat_of(ddp.module))
    ddp.close()
    return flats


def one_round(case: Case, task: Task, ddp: DDP, optimizer: Optimizer, number: int) -> None:
    """As users write it, with a GradScaler whose scale stays, if there is one."""
    optimizer.zero_grad()
    if case.life != "scaled":
        task.backward(ddp, number, ddp.transport.rank, ddp.no_sync)
        task.limit(ddp)
        optimizer.step()
        return
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaled = Task(
        task.make_model,
        task.make_optimizer,
        task.shard,
        lambda model, shard: scaler.scale(task.loss(model, shard)),
        task.accumulate,
    )
    scaled.backward(ddp, number, ddp.transport.rank, ddp.no_sync)
    if task.clip:
        scaler.unscale_(optimizer)
        task.limit(ddp)
    scaler.step(optimizer)


def bucket_bytes(case: Case) -> int:
    return 300 if case.model == "planned_anew" else 25 * 2**20


# Beside the simulation


def check(case: Case, runs: Sequence[Run], within: float | None = None) -> None:
    """Every step of every rank is as simulated, replicas that share their steps are equal, a resumed run to the bit."""
    task, places, skips = case.task(), case.places(), case.skips()
    wanted = simulate(case.rule(runs), task, case.size, STEPS, places, skips=skips)
    flats = by_step(runs)
    assert_close(flats, wanted, case.within if within is None else within, but=() if case.entry.lockstep else skips)
    parameters = sum(parameter.numel() for parameter in task.make_model().parameters())
    begin = COMES if case.life == "switched_to" else 0
    for each in flats[begin:]:
        assert not case.entry.lockstep or spread([flat[:parameters] for flat in each]) == 0
    for run in runs:
        assert all(bool(torch.isfinite(flat).all()) for flat in run.flats)
        if case.life == "resumed":
            assert len(run.observed) == STEPS - GOES
            assert all(torch.equal(*each) for each in zip(run.observed, run.flats[GOES:], strict=True))


# Which cases

Pair = frozenset[tuple[str, Any]]


def pairs_of(case: Case) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(case._asdict().items(), 2)}


def all_pairs() -> set[Pair]:
    """Any two values of two axes that a case can have."""
    items = [[(axis, value) for value in AXES[axis]] for axis in AXES]
    found = itertools.chain.from_iterable(itertools.product(*two) for two in itertools.combinations(items, 2))
    return {frozenset(pair) for pair in found} - {frozenset(IMPOSSIBLE)}


def pairwise() -> list[Case]:
    """Cases in which any two values of two axes meet: greedy, and the same every time."""
    left, chosen = all_pairs(), []
    while left:
        chosen.append(_next_case(left, len(chosen)))
        left -= pairs_of(chosen[-1])
    return chosen


def _next_case(left: set[Pair], number: int) -> Case:
    """Begin with two values that have not met, and add what has met the fewest of those chosen."""
    case: dict[str, Any] = dict(min(left, key=lambda pair: zlib.crc32(f"{sorted(map(str, pair))}".encode())))
    for axis in AXES:
        if axis not in case:
            case[axis] = max(AXES[axis], key=lambda value: _gain(left, case, (axis, value), number))
    return Case(**case)


def _gain(left: set[Pair], case: Mapping[str, Any], item: tuple[str, Any], number: int) -> tuple[int, int, int]:
    """How many pairs are new; then the smaller world is the better one."""
    news = [frozenset((item, each)) for each in case.items()]
    count = sum(pair in left for pair in news) if frozenset(IMPOSSIBLE) not in news else -1
    return count, -item[1] if item[0] == "size" else 0, zlib.crc32(f"{number} {item}".encode())
