"""Streaming DiLoCo (arXiv 2501.18512), element by element: which fragment it belongs to, and when that has its turn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oracles.algorithms.simulation import Feedback, Lossy, Replicas, Rule, chunks, lossy_mean, mean

FROZEN = -1


def fragments_of(replicas: Replicas, count: int) -> Tensor:
    """The fragment of each element of a flat: equal runs of the trained parameters of a dtype; the last has buffers."""
    model = replicas.models[0]
    parameters = list(model.parameters())
    places = torch.split(torch.arange(replicas.num_parameters()), [each.numel() for each in parameters])
    result = torch.full((replicas.flats()[0].numel(),), count - 1)
    result[: replicas.num_parameters()] = FROZEN
    for dtype in {each.dtype for each in parameters}:
        trained = [
            place for place, each in zip(places, parameters, strict=True) if each.requires_grad and each.dtype is dtype
        ]
        if trained:
            whole = torch.cat(trained)
            for index, chunk in enumerate(chunks(whole.numel(), count)):
                result[whole[chunk]] = index
    return result


class StreamingDiLoCo(Rule):
    """Fragment p of P, after the steps t = (p + 1) H // P - overlap (mod H), counted from 1:

    d = mean(theta - x); v <- mu v + d; theta <- theta - lr (d + mu v); and `overlap` steps later
    x <- alpha x + (1 - alpha) theta. A buffer takes the place of theta by its mean. With `q` the changes travel
    lossily, as q(mean q(theta - x)), by a `q()` of its own for each fragment.
    """

    def __init__(
        self,
        interval: int,
        fragments: int,
        overlap: int,
        alpha: float,
        lr: float = 0.7,
        momentum: float = 0.9,
        q: Callable[[], Lossy | Feedback] | None = None,
    ) -> None:
        self.interval, self.fragments, self.overlap, self.alpha = interval, fragments, overlap, alpha
        self.lr, self.momentum = lr, momentum
        self.qs = [None if q is None else q() for _ in range(fragments)]

    def start(self, replicas: Replicas) -> None:
        self.theta = replicas.flats()[0]
        self.velocity = torch.zeros_like(self.theta)
        self.fragment_of = fragments_of(replicas, self.fragments)
        self.is_buffer = torch.arange(self.theta.numel()) >= replicas.num_parameters()
        self.arrivals: dict[int, tuple[Tensor, Tensor]] = {}  # by round: which elements, and what they get

    def after_step(self, replicas: Replicas) -> None:
        self._arrive(replicas)
        for index in range(self.fragments):
            end = (index + 1) * self.interval // self.fragments
            if (replicas.round + 1) % self.interval == (end - self.overlap) % self.interval:
                self._exchange(replicas, index)
        if self.overlap == 0:
            self._arrive(replicas)

    def _exchange(self, replicas: Replicas, index: int) -> None:
        chosen = self.fragment_of == index
        weights, buffers = chosen & ~self.is_buffer, chosen & self.is_buffer
        flats, q = replicas.flats(), self.qs[index]
        changes = [self.theta[weights] - flat[weights] for flat in flats]
        change = mean(changes) if q is None else lossy_mean(changes, q)
        velocity = self.velocity[weights].mul(self.momentum).add(change)
        self.velocity[weights] = velocity
        self.theta[weights] = self.theta[weights].sub(change.add(velocity, alpha=self.momentum), alpha=self.lr)
        news = self.theta.clone()
        news[buffers] = mean([flat[buffers] for flat in flats])
        self.arrivals[replicas.round + self.overlap] = chosen, news

    def _arrive(self, replicas: Replicas) -> None:
        if replicas.round in self.arrivals:
            chosen, news = self.arrivals.pop(replicas.round)
            mixed = [self.alpha * flat + (1 - self.alpha) * news for flat in replicas.flats()]
            replicas.set(torch.where(chosen, new, flat) for new, flat in zip(mixed, replicas.flats(), strict=True))
