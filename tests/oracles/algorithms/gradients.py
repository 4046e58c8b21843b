"""Algorithms that exchange gradients or momenta: every rank applies the same step.

A `layout` says which parameters travel together: a list of lists of names. Chunks are cut from each list's gradients,
end to end; the default is one list of all parameters in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from oracles.algorithms.simulation import Lossy, Replicas, Rule, lossy_mean, mean, total

Layout = Sequence[Sequence[str]]
LayoutOf = Callable[[int], Layout]
"""The layout of a round: the wrapper takes the order in which gradients come once it has seen one."""


def layout_of(models: Sequence[nn.Module], layout: LayoutOf | None, number: int) -> Layout:
    return layout(number) if layout is not None else [[name for name, _ in models[0].named_parameters()]]


def gathered(models: Sequence[nn.Module], names: Sequence[str]) -> list[Tensor]:
    """The gradients of each rank end to end, zeros where it has none."""
    flats = []
    for model in models:
        parameters = dict(model.named_parameters())
        parts = [parameters[name] for name in names]
        flats.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parts]))
    return flats


def hand_out(models: Sequence[nn.Module], names: Sequence[str], flat: Tensor) -> None:
    """Give every rank its gradients; a parameter that nobody used keeps none."""
    everyone = [dict(model.named_parameters()) for model in models]
    start = 0
    for name in names:
        used = any(parameters[name].grad is not None for parameters in everyone)
        for parameters in everyone:
            parameter = parameters[name]
            if used:
                parameter.grad = flat[start : start + parameter.numel()].view(parameter.shape).clone()
        start += everyone[0][name].numel()


def exchanged(replicas: Replicas, flats: Sequence[Tensor], q: Lossy, hierarchical: bool) -> Tensor:
    """q(mean q(g)): between ranks, or between the means of hosts, each weighted by its ranks."""
    teams = replicas.teams(hierarchical)
    means = [mean([flats[rank] for rank in team]) for team in teams]
    return lossy_mean(means, q, [len(team) for team in teams])


class AllReduce(Rule):
    """g <- mean g, or the sum; with `q`, q(mean q(g))."""

    takes_buffers_of_rank_0 = True

    def __init__(
        self,
        average: bool = True,
        q: Lossy | None = None,
        hierarchical: bool = False,
        layout: LayoutOf | None = None,
    ) -> None:
        self.average, self.q, self.hierarchical, self.layout = average, q, hierarchical, layout

    def after_backward(self, replicas: Replicas) -> None:
        for names in layout_of(replicas.models, self.layout, replicas.round):
            flats = gathered(replicas.models, names)
            if self.q is not None:
                result = exchanged(replicas, flats, self.q, self.hierarchical)
                assert self.average
            else:
                result = mean(flats) if self.average else total(flats).to(flats[0].dtype)
            hand_out(replicas.models, names, result)


class QAdam(Rule):
    """Adam on the mean gradient for `warmup` steps; then the second moment rests and q(mean q(m)) is the first.

    Step k counts from 1; the bias correction of v stays that of step `warmup`.
    """

    takes_buffers_of_rank_0 = True

    def __init__(
        self,
        q: Lossy,
        warmup: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hierarchical: bool = False,
        layout: LayoutOf | None = None,
    ) -> None:
        self.q, self.warmup, self.lr, self.betas, self.eps = q, warmup, lr, betas, eps
        self.weight_decay, self.hierarchical, self.layout = weight_decay, hierarchical, layout

    def start(self, replicas: Replicas) -> None:
        zeros = {name: torch.zeros_like(p) for name, p in replicas.models[0].named_parameters()}
        self.first = [dict(zeros) for _ in range(replicas.size)]
        self.second = dict(zeros)

    def after_backward(self, replicas: Replicas) -> None:
        if replicas.round + 1 <= self.warmup:
            AllReduce(layout=self.layout).after_backward(replicas)

    def before_step(self, replicas: Replicas) -> None:
        number = replicas.round + 1
        beta1, beta2 = self.betas
        for rank, model in enumerate(replicas.models):
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                gradient = parameter.grad + self.weight_decay * parameter
                self.first[rank][name] = beta1 * self.first[rank][name] + (1 - beta1) * gradient
                if number <= self.warmup and rank == 0:
                    self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient * gradient
        if number <= self.warmup:
            return
        for names in layout_of(replicas.models, self.layout, replicas.round):
            flats = [torch.cat([own[name].reshape(-1) for name in names]) for own in self.first]
            common = exchanged(replicas, flats, self.q, self.hierarchical)
            start = 0
            for name in names:
                shape = self.first[0][name].shape
                part = common[start : start + shape.numel()].view(shape)
                start += shape.numel()
                for own in self.first:
                    own[name] = part

    def step(self, replicas: Replicas, rank: int) -> None:
        number = replicas.round + 1
        beta1, beta2 = self.betas
        with torch.no_grad():
            for name, parameter in replicas.models[rank].named_parameters():
                first = self.first[rank][name] / (1 - beta1**number)
                second = self.second[name] / (1 - beta2 ** min(number, self.warmup))
                parameter -= self.lr * first / (second.sqrt() + self.eps)
