"""What each algorithm owes its replicas, and when: one object for each simulated rank, in plain torch.

`open` is called when a round begins: at the first training forward of the root, or, in a round that had none, when its
backward runs; `end` when a synchronising backward has left its gradients; `settle` between two rounds, before a forward
and in the wrapper's own calls; `before_collective` before an operation of the user's own on the transport. What waits
for other ranks is a generator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from murmura.algorithms.topology import Topology
from oracles import minmax
from oracles.algorithms.peers import shift_one
from sequences.actions import Choice
from sequences.algorithms import topology_of

if TYPE_CHECKING:
    from sequences.simulation import Replica

Waiting = Generator[Any, Any, None]
Weights = dict[str, Tensor]


def mean_of(all_values: list[Weights]) -> Weights:
    """The mean by name, in rank order."""
    return {name: sum(each[name] for each in all_values) / len(all_values) for name in all_values[0]}  # type: ignore[misc]


def eight_bits(values: Tensor) -> Tensor:
    """What arrives of `values`, from the oracle of the code."""
    return minmax.decode(minmax.encode(values, 4096), values.numel(), values.dtype, 4096)


class Rule:
    """Nothing is exchanged."""

    kept: tuple[str, ...] = ()  # attributes that a checkpoint holds
    leaves_out_step = False  # the step under way, as another rank does

    def __init__(self, rank: Replica, choice: Choice) -> None:
        self.rank, self.choice = rank, choice

    @property
    def exchanges_weights(self) -> bool:
        return True

    @property
    def weight_in_mean(self) -> float:
        return 1.0

    def begin(self) -> None:
        """Start from the weights as they are; also after other weights were loaded."""

    def take_in(self, names: list[str]) -> None:
        """Parameters that were thawed belong to the model from now on."""

    def look(self) -> None:
        """Look at the gradients before a forward between two rounds, or before a round's first backward of the root."""

    def open(self) -> Waiting:
        yield from ()

    def end(self) -> Waiting:
        yield from ()

    def before_step(self) -> Waiting:
        yield from ()

    def after_step(self) -> Waiting:
        yield from ()

    def settle(self) -> Waiting:
        yield from ()

    def before_collective(self) -> Waiting:
        yield from ()

    def state(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name)) for name in self.kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, copy.deepcopy(value))


class MeanGradients(Rule):
    """p.grad becomes the mean over the ranks.

    In a join a round's own gradients are summed and divided by the shares of real batches; what an earlier round left
    is the same everywhere, and stays.
    """

    @property
    def exchanges_weights(self) -> bool:
        return False

    def end(self) -> Waiting:
        yield from average_gradients(self.rank)


def average_gradients(rank: Replica) -> Waiting:
    mine: dict[str, tuple[Tensor, Tensor] | None] = {}
    for name, parameter in rank.included():
        if parameter.grad is None:
            mine[name] = None
        else:
            new = rank.own_gradients.get(name, torch.zeros_like(parameter))
            mine[name] = (parameter.grad - new, new)
    everyone = yield from rank.exchange("gradients", (rank.weight, mine))
    total_weight = sum(weight for weight, _ in everyone)
    for name, parameter in rank.included():
        parts = [gradients[name] for _, gradients in everyone if gradients[name] is not None]
        if parts:
            earlier = sum(old for old, _ in parts) / len(everyone)
            parameter.grad = (earlier + sum(new for _, new in parts) / total_weight).clone()


class Decentralized(Rule):
    """A(x_t) is formed of what was read when the round began, and written before the step, or when it is settled."""

    def begin(self) -> None:
        self.read: Weights | None = None  # x_t
        self.key: Any = None
        self.meeting = 0

    def open(self) -> Waiting:
        rank = self.rank
        if rank.round % self.choice.interval:
            return
        value = rank.weights()
        if self.read is not None:  # nothing could be written since: the weights as they would be
            value = yield from self.mixed()
        self.read = rank.weights()
        self.meeting = rank.round // self.choice.interval
        self.key = rank.post("weights", value)

    def mixed(self) -> Generator[Any, Any, Weights]:
        """The weights with A(x_t) in the place of x_t."""
        everyone = yield self.key
        average = self.average(everyone)
        read, now = self.read, self.rank.weights()
        assert read is not None
        return {
            name: torch.where(x == read[name], average[name], x + average[name] - read[name]) if name in read else x
            for name, x in now.items()
        }

    def average(self, everyone: list[Weights]) -> Weights:
        return mean_of(everyone)

    def settle(self) -> Waiting:
        if self.read is not None:
            new = yield from self.mixed()
            self.read = None
            self.rank.write(new)

    def before_step(self) -> Waiting:
        yield from self.settle()


class ShiftOne(Decentralized):
    def average(self, everyone: list[Weights]) -> Weights:
        peer = shift_one(len(everyone), self.meeting)[self.rank.number]
        return mean_of([everyone[each] for each in sorted({peer, self.rank.number})])


class OverGraph(Decentralized):
    def average(self, everyone: list[Weights]) -> Weights:
        return mixed_over(topology_of(self.choice), everyone, self.rank.number, self.meeting)


def mixed_over(topology: Topology, everyone: list[Weights], number: int, meeting: int) -> Weights:
    """What rank `number` makes of what all hold."""
    _, senders, (own, *shares) = topology(number, len(everyone), meeting)
    parts = [(own, everyone[number]), *((share, everyone[each]) for share, each in zip(shares, senders, strict=True))]
    return {name: sum(share * each[name] for share, each in parts) for name in everyone[number]}  # type: ignore[misc]


class AfterStep(Rule):
    """Each round that is due owes an exchange: after the step, or, where it is skipped, when it is settled.

    What rounds before the last one owe is settled before the step. Before an operation of the user's own a rank does
    not know whether its step was skipped or is still to come: the ranks communicate if any of them has stepped.
    """

    is_restarted = has_begun = False

    def begin(self) -> None:
        self.num_pending = 0
        self.is_last_due = False
        self.is_restarted, self.has_begun = self.has_begun, True

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.is_restarted = False

    def start_from_mean(self, own: Weights) -> Generator[Any, Any, Weights]:
        """Where other weights were loaded since, `own` may differ: their mean, and the weights move along."""
        if not self.is_restarted:
            return own
        self.is_restarted = False
        mean = mean_of((yield from self.rank.exchange("restart", own)))
        now = self.rank.weights()
        self.rank.write({name: now[name] + mean[name] - each for name, each in own.items()})
        return mean

    def is_due(self, number: int) -> bool:
        return (number + 1) % self.choice.interval == 0

    def end(self) -> Waiting:
        self.is_last_due = self.is_due(self.rank.round)
        self.num_pending += self.is_last_due
        yield from ()

    def before_step(self) -> Waiting:
        yield from self.settle(num_left=int(self.is_last_due))

    def after_step(self) -> Waiting:
        yield from self.settle()

    def settle(self, num_left: int = 0) -> Waiting:
        while self.num_pending > num_left:
            yield from self.rank.exchange("votes", True)
            self.num_pending -= 1
            yield from self.communicate()

    def before_collective(self) -> Waiting:
        while self.num_pending:
            votes = yield from self.rank.exchange("votes", False)
            if not any(votes):
                return
            self.num_pending -= 1
            yield from self.communicate()

    def communicate(self) -> Waiting:
        raise NotImplementedError


class LocalSGD(AfterStep):
    def communicate(self) -> Waiting:
        everyone = yield from self.rank.exchange("weights", self.rank.weights())
        self.rank.write(mean_of(everyone))


class DiLoCo(AfterStep):
    """d = mean(theta - x); v <- 0.9 v + d; theta <- theta - 0.7 (d + 0.9 v); x <- theta. Buffers: their mean."""

    kept = ("theta", "velocity")

    def begin(self) -> None:
        super().begin()
        self.theta: Weights = {}
        self.velocity: Weights = {}
        self.take_in([name for name, _ in self.rank.included()])

    def take_in(self, names: list[str]) -> None:
        for name, each in self.rank.included():
            if name in names:
                self.theta[name] = each.detach().clone()
                self.velocity[name] = torch.zeros_like(each)

    def communicate(self) -> Waiting:
        self.theta = yield from self.start_from_mean(self.theta)
        own = {name: self.theta[name] - x if name in self.theta else x for name, x in self.rank.weights().items()}
        everyone = yield from self.rank.exchange("weights", own)
        new = mean_of(everyone)
        for name, theta in self.theta.items():
            self.velocity[name] = 0.9 * self.velocity[name] + new[name]
            self.theta[name] = theta - 0.7 * (new[name] + 0.9 * self.velocity[name])
            new[name] = self.theta[name].clone()
        self.rank.write(new)


class LowPrecision(AfterStep):
    """z = x + L/3 + R/3 - 5w/3 in eight bits to both neighbours; x <- w + z, and everyone's replica of it too."""

    kept = ("mine", "left", "right")

    def begin(self) -> None:
        super().begin()
        self.mine, self.left, self.right = (self.rank.weights() for _ in range(3))

    def take_in(self, names: list[str]) -> None:
        now = self.rank.weights()
        for replica in (self.mine, self.left, self.right):
            replica.update({name: now[name].clone() for name in names})

    def is_due(self, number: int) -> bool:
        return number % self.choice.interval == 0

    def change(self, x: Tensor, name: str) -> Tensor:
        # Where nothing has changed since the last exchange, values lie half-way between two codes: the order of the
        # operations, which is the library's too, then decides.
        return x.add(self.left[name], alpha=1 / 3).add(self.right[name], alpha=1 / 3).sub(self.mine[name], alpha=5 / 3)

    def communicate(self) -> Waiting:
        if self.is_restarted:
            self.mine = yield from self.start_from_mean(self.mine)
            self.left, self.right = dict(self.mine), dict(self.mine)
        names = list(self.mine)
        x = self.rank.weights()
        parts = [self.change(x[each], each) for each in names]
        arrives = eight_bits(torch.cat([part.reshape(-1) for part in parts]))
        pieces = torch.split(arrives, [part.numel() for part in parts])
        sent = {name: piece.view(x[name].shape) for name, piece in zip(names, pieces, strict=True)}
        everyone = yield from self.rank.exchange("weights", sent)
        number, size = self.rank.number, len(everyone)
        for replica, other in ((self.left, number - 1), (self.right, number + 1), (self.mine, number)):
            for name in names:
                replica[name] = replica[name] + everyone[other % size][name]
        self.rank.write({name: each.clone() for name, each in self.mine.items()})


class Async(Rule):
    """mean - snapshot, of before round t when t % interval = 0, is added when it is settled.

    Where a further round begins in a backward, and nothing could be added since, its snapshot is of the weights as they
    would be, and the corrections add up. In the warm-up gradients are averaged.
    """

    def begin(self) -> None:
        self.snapshot: Weights | None = None
        self.earlier: Weights | None = None  # corrections from before the snapshot that are not added yet
        self.key: Any = None

    @property
    def exchanges_weights(self) -> bool:
        return self.rank.round >= self.choice.warmup

    def open(self) -> Waiting:
        if not self.exchanges_weights or self.rank.round % self.choice.interval:
            return
        self.earlier = yield from self.correction()
        now = self.rank.weights()
        if self.earlier is not None:
            now = {name: x + self.earlier.get(name, torch.zeros_like(x)) for name, x in now.items()}
        self.snapshot, self.key = now, self.rank.post("weights", now)

    def correction(self) -> Generator[Any, Any, Weights | None]:
        """All that is still to be added."""
        if self.snapshot is None:
            return None
        average = mean_of((yield self.key))
        found = {name: average[name] - x for name, x in self.snapshot.items()}
        if self.earlier is not None:
            found = {name: x + self.earlier.get(name, torch.zeros_like(x)) for name, x in found.items()}
        return found

    def end(self) -> Waiting:
        if not self.exchanges_weights:
            yield from average_gradients(self.rank)

    def settle(self) -> Waiting:
        change = yield from self.correction()
        self.begin()
        if change is not None:
            now = self.rank.weights()
            self.rank.write({name: now[name] + each for name, each in change.items()})


RULES: dict[str, Callable[[Any, Choice], Rule]] = {
    "gradient_allreduce": MeanGradients,
    "bytegrad": MeanGradients,
    "decentralized": Decentralized,
    "shift_one": ShiftOne,
    "exponential": OverGraph,
    "random_matching": OverGraph,
    "low_precision_decentralized": LowPrecision,
    "async": Async,
    "local_sgd": LocalSGD,
    "diloco": DiLoCo,
}
