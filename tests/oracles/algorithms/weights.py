"""Algorithms that exchange weights: gossip and averages, with or without delay.

Buffers are averaged together with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oracles.algorithms.peers import shift_one
from oracles.algorithms.simulation import Feedback, Lossy, Replicas, Rule, lossy_mean, mean
from oracles.algorithms.streaming_diloco import StreamingDiLoCo


def gossip(replicas: Replicas, flats: Sequence[Tensor], mode: str, number: int, hierarchical: bool) -> list[Tensor]:
    """What each rank holds after one exchange; `mode` is "all" or "shift_one"."""
    teams = replicas.teams(hierarchical)
    sizes = [len(team) for team in teams]
    means = [mean([flats[rank] for rank in team]) for team in teams]
    result: list[Tensor] = [torch.empty(0)] * replicas.size
    peers = shift_one(len(teams), number)
    for index, team in enumerate(teams):
        if mode == "all":
            new = mean(means, sizes)
        else:
            pair = sorted({index, peers[index]})
            new = (
                mean([means[each] for each in pair], [sizes[each] for each in pair]) if len(pair) > 1 else means[index]
            )
        for rank in team:
            result[rank] = new
    return result


class Decentralized(Rule):
    """The gradient at x_t; then x <- A(x_t); then the optimizer.

    What the forward did to a buffer is kept: b <- b + A(b_t) - b_t.
    """

    def __init__(self, mode: str = "all", interval: int = 1, hierarchical: bool = False) -> None:
        self.mode, self.interval, self.hierarchical = mode, interval, hierarchical

    def start(self, replicas: Replicas) -> None:
        self.num_exchanges = 0
        self.snapshots: list[Tensor] | None = None

    def before_forward(self, replicas: Replicas) -> None:
        self.snapshots = replicas.flats() if replicas.round % self.interval == 0 else None

    def before_step(self, replicas: Replicas) -> None:
        if self.snapshots is None:
            return
        mixed = gossip(replicas, self.snapshots, self.mode, self.num_exchanges, self.hierarchical)
        self.num_exchanges += 1
        news = [now - before for now, before in zip(replicas.flats(), self.snapshots, strict=True)]
        for each in news:
            each[: replicas.num_parameters()] = 0
        replicas.set(new + change for new, change in zip(mixed, news, strict=True))


class LocalSGD(Rule):
    """x <- mean x after the step of every `interval`-th round."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def after_step(self, replicas: Replicas) -> None:
        if (replicas.round + 1) % self.interval == 0:
            replicas.set([mean(replicas.flats())] * replicas.size)


class WithMoments(Rule):
    """After every `interval`-th exchange of `inner`, also the mean of what optimizers remember of each parameter."""

    def __init__(self, inner: LocalSGD | DiLoCo | StreamingDiLoCo) -> None:
        self.inner, self.interval = inner, inner.interval

    def start(self, replicas: Replicas) -> None:
        self.inner.start(replicas)

    def after_step(self, replicas: Replicas) -> None:
        self.inner.after_step(replicas)
        if (replicas.round + 1) % self.interval == 0:
            models = [list(model.parameters()) for model in replicas.models]
            for own in zip(*models, strict=True):
                states = [optimizer.state[each] for optimizer, each in zip(replicas.optimizers, own, strict=True)]
                for key in {key: None for state in states for key in state}:
                    zeros = torch.zeros_like(next(state[key] for state in states if key in state))
                    common = mean([state.get(key, zeros) for state in states])  # zeros where it has not stepped on it
                    for state in states:
                        state[key] = common.clone()


class DiLoCo(Rule):
    """d = mean(theta - x); v <- mu v + d; theta <- theta - lr (d + mu v); x <- theta. Buffers: their mean.

    With `q` the changes travel lossily, as q(mean q(theta - x)) over the parameters in their order.
    """

    def __init__(
        self, interval: int, lr: float = 0.7, momentum: float = 0.9, q: Lossy | Feedback | None = None
    ) -> None:
        self.interval, self.lr, self.momentum, self.q = interval, lr, momentum, q

    def start(self, replicas: Replicas) -> None:
        self.theta = replicas.flats()[0][: replicas.num_parameters()]
        self.velocity = torch.zeros_like(self.theta)

    def after_step(self, replicas: Replicas) -> None:
        if (replicas.round + 1) % self.interval != 0:
            return
        flats = replicas.flats()
        length = replicas.num_parameters()
        change = self.common([self.theta - flat[:length] for flat in flats])
        self.velocity = self.velocity.mul(self.momentum).add(change)
        self.theta = self.theta.sub(change.add(self.velocity, alpha=self.momentum), alpha=self.lr)
        buffers = mean([flat[length:] for flat in flats])
        replicas.set([torch.cat([self.theta, buffers])] * replicas.size)

    def common(self, changes: list[Tensor]) -> Tensor:
        return mean(changes) if self.q is None else lossy_mean(changes, self.q)


class SparseLoCo(Rule):
    """m <- theta - x + decay m; each sends q(m), which leaves m; theta, x <- theta - mean of what was sent.

    Buffers: their mean. Frozen parameters do not travel. One rank alone sends nothing, and loses nothing.
    """

    def __init__(self, interval: int, decay: float, q: Lossy) -> None:
        self.interval, self.decay, self.q = interval, decay, q

    def start(self, replicas: Replicas) -> None:
        parameters = list(replicas.models[0].parameters())
        self.travels = torch.cat([torch.full((each.numel(),), each.requires_grad) for each in parameters])
        self.theta = replicas.flats()[0][: self.travels.numel()]
        self.m = [torch.zeros_like(self.theta[self.travels])] * replicas.size

    def after_step(self, replicas: Replicas) -> None:
        if (replicas.round + 1) % self.interval:
            return
        flats, length, travels = replicas.flats(), self.travels.numel(), self.travels
        changes = [(self.theta - flat[:length])[travels] for flat in flats]
        changed = [change.add(m, alpha=self.decay) for m, change in zip(self.m, changes, strict=True)]
        sent = [self.q(each) for each in changed] if replicas.size > 1 else changed
        self.m = [each - gone for each, gone in zip(changed, sent, strict=True)]
        self.theta[travels] -= mean(sent)
        replicas.set([torch.cat([self.theta, mean([flat[length:] for flat in flats])])] * replicas.size)


class AsyncModelAverage(Rule):
    """Snapshots before round t when t % interval = 0; mean - snapshot is added before round t + 1."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def start(self, replicas: Replicas) -> None:
        self.corrections: list[Tensor] | None = None

    def before_forward(self, replicas: Replicas) -> None:
        if self.corrections is not None:
            replicas.set(flat + each for flat, each in zip(replicas.flats(), self.corrections, strict=True))
            self.corrections = None
        if replicas.round % self.interval == 0:
            snapshots = replicas.flats()
            common = mean(snapshots)
            self.corrections = [common - snapshot for snapshot in snapshots]


class LowPrecision(Rule):
    """Quantised differences on a ring, after the step; a host is one place on the ring, held by its mean.

    `mine[i]`, `left[i]` and `right[i]` are place i's own replica and those it keeps of its neighbours.
    """

    def __init__(self, q: Lossy, interval: int = 1, hierarchical: bool = False) -> None:
        self.q, self.interval, self.hierarchical = q, interval, hierarchical

    def start(self, replicas: Replicas) -> None:
        self.teams = replicas.teams(self.hierarchical)
        assert len({len(team) for team in self.teams}) == 1
        first = replicas.flats()[0]
        self.mine, self.left, self.right = ([first.clone() for _ in self.teams] for _ in range(3))

    def after_step(self, replicas: Replicas) -> None:
        places = len(self.teams)
        if replicas.round % self.interval != 0 or places == 1:
            return
        flats = replicas.flats()
        sent = []
        for place, team in enumerate(self.teams):
            x = mean([flats[rank] for rank in team])
            z = x + self.left[place] / 3 + self.right[place] / 3 - 5 * self.mine[place] / 3
            sent.append(self.q(z))
        for place, team in enumerate(self.teams):
            self.left[place] = self.left[place] + sent[(place - 1) % places]
            self.right[place] = self.right[place] + sent[(place + 1) % places]
            self.mine[place] = self.mine[place] + sent[place]
            for rank in team:
                flats[rank] = self.mine[place]
        replicas.set(flats)
