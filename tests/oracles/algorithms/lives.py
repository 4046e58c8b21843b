"""What happens to replicas besides their rule: data that runs out, steps that are skipped, a change of algorithm."""

from __future__ import annotations

import copy
from typing import Any

import torch

from oracles.algorithms.gradients import AllReduce, GatheredAllReduce, QAdam
from oracles.algorithms.push_sum import PushSum
from oracles.algorithms.simulation import Feedback, Replicas, Rule, mean


class Around(Rule):
    """As `inner`, in every moment."""

    def __init__(self, inner: Rule) -> None:
        self.inner = inner

    @property
    def takes_buffers_of_rank_0(self) -> bool:  # type: ignore[override]
        return self.inner.takes_buffers_of_rank_0

    def start(self, replicas: Replicas) -> None:
        self.inner.start(replicas)

    def before_forward(self, replicas: Replicas) -> None:
        self.inner.before_forward(replicas)

    def after_backward(self, replicas: Replicas) -> None:
        self.inner.after_backward(replicas)

    def before_step(self, replicas: Replicas) -> None:
        self.inner.before_step(replicas)

    def step(self, replicas: Replicas, rank: int) -> None:
        self.inner.step(replicas, rank)

    def after_step(self, replicas: Replicas) -> None:
        self.inner.after_step(replicas)


def divide_gradients(replicas: Replicas, by: float) -> None:
    for model in replicas.models:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / by


class Unscaled(Around):
    """Mean gradients over `scale`, which they never had."""

    def __init__(self, inner: Rule, scale: float) -> None:
        super().__init__(inner)
        self.scale = scale

    def after_backward(self, replicas: Replicas) -> None:
        super().after_backward(replicas)
        divide_gradients(replicas, self.scale)


class Joined(Around):
    """Ranks have so many batches each, and bring gradients of zero afterwards: a mean is one over the batches.

    Gradients that are compressed are weighted before. QAdam, once it is warm, has a mean of moments over the ranks.
    """

    def __init__(self, inner: Rule, lengths: list[int]) -> None:
        super().__init__(inner)
        self.lengths = lengths

    def after_backward(self, replicas: Replicas) -> None:
        share = sum(replicas.round < length for length in self.lengths) / replicas.size
        is_qadam = isinstance(self.inner, QAdam)
        is_warm = isinstance(self.inner, QAdam) and self.inner.num_steps >= self.inner.warmup
        if self.inner.takes_buffers_of_rank_0 and not is_qadam:
            divide_gradients(replicas, share)
        super().after_backward(replicas)
        if is_qadam and not is_warm:
            divide_gradients(replicas, share)


class ForgetsSkipped(Around):
    """A step that is skipped takes back what messages lost in its round; draws at random are not taken back."""

    def after_backward(self, replicas: Replicas) -> None:
        inner: Any = self.inner
        holder = inner.q if isinstance(inner, AllReduce) else inner
        before = copy.deepcopy(holder.lost) if isinstance(holder, Feedback | GatheredAllReduce) else None
        super().after_backward(replicas)
        if before is not None and replicas.skipping:
            holder.lost = before


class Switched(Around):
    """`inner`, and from round `until` on `then`, which begins with the means of weights, buffers and moments."""

    def __init__(self, inner: Rule, until: int, then: Rule) -> None:
        super().__init__(inner)
        self.until, self.then = until, then
        if isinstance(then, PushSum):  # which counts its own exchanges
            matrix = then.matrix
            then.matrix = lambda size, number: matrix(size, number - until)

    def before_forward(self, replicas: Replicas) -> None:
        if replicas.round == self.until:
            former, self.inner = self.inner, self.then
            if not former.takes_buffers_of_rank_0:
                self._average(replicas, former)
            self.then.start(replicas)
            if self.then.takes_buffers_of_rank_0:
                for model in replicas.models[1:]:
                    for buffer, source in zip(model.buffers(), replicas.models[0].buffers(), strict=True):
                        buffer.copy_(source)
        super().before_forward(replicas)

    def _average(self, replicas: Replicas, former: Rule) -> None:
        shares = former.w if isinstance(former, PushSum) else torch.ones(replicas.size)
        flats = [float(share) * flat for share, flat in zip(shares, replicas.flats(), strict=True)]
        replicas.set([mean(flats)] * replicas.size)
        if not self.then.takes_buffers_of_rank_0:
            return
        for own in zip(*(model.parameters() for model in replicas.models), strict=True):
            states = [optimizer.state[each] for optimizer, each in zip(replicas.optimizers, own, strict=True)]
            for key in {key: None for state in states for key in state}:
                zeros = torch.zeros_like(next(state[key] for state in states if key in state))
                common = mean([state.get(key, zeros) for state in states])  # zeros where it has not stepped on it
                for state in states:
                    state[key] = common.clone()


class QAdamUntil(Around):
    """`inner`, a `QAdam`; from round `until` on, mean gradients for the same optimizer."""

    def __init__(self, inner: QAdam, until: int) -> None:
        super().__init__(inner)
        self.optimizer, self.until = inner, until

    def after_backward(self, replicas: Replicas) -> None:
        if replicas.round >= self.until:
            self.optimizer.q = torch.clone  # of moments that are equal
            AllReduce().after_backward(replicas)
        else:
            super().after_backward(replicas)
