"""Algorithms that exchange gradients or momenta: every rank applies the same step.

A `layout` says which parameters travel together: a list of lists of names. Chunks are cut from each list's gradients,
end to end; the default is one list of all parameters in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from oracles.algorithms.simulation import Feedback, Lossy, Replicas, Rule, chunks, lossy_mean, mean, total

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
                part = flat[start : start + parameter.numel()].view(parameter.shape)
                parameter.grad = part.to(parameter.dtype, copy=True)
        start += everyone[0][name].numel()


def exchanged(
    replicas: Replicas, flats: Sequence[Tensor], q: Lossy | Feedback, hierarchical: bool, subject: Hashable = None
) -> Tensor:
    """q(mean q(g)): between ranks, or between the means of hosts, each weighted by its ranks."""
    teams = replicas.teams(hierarchical)
    means = [mean([flats[rank] for rank in team]) for team in teams]
    return lossy_mean(means, q, [len(team) for team in teams], subject)


def moved(
    lost: dict[Hashable, Tensor], layout: Layout, numels: dict[str, int], num_senders: int
) -> dict[Hashable, Tensor]:
    """What messages lost, which belongs to elements of parameters, for streams that are cut by another layout."""
    by_name: dict[Hashable, dict[str, Tensor]] = {sender: {} for sender in (*range(num_senders), "mean")}
    for names in dict.fromkeys(stream[0] for stream in lost):
        for sender, parts in by_name.items():
            flat = torch.cat([lost[names, number, sender] for number in range(num_senders)])
            parts.update(zip(names, flat.split([numels[name] for name in names]), strict=True))
    if not lost:
        return {}
    result: dict[Hashable, Tensor] = {}
    for names in map(tuple, layout):
        for sender, parts in by_name.items():
            flat = torch.cat([parts[name] for name in names])
            for number, chunk in enumerate(chunks(flat.numel(), num_senders)):
                result[names, number, sender] = flat[chunk]
    return result


def unused_elements(models: Sequence[nn.Module], names: Sequence[str]) -> Tensor:
    """Which elements of the parameters `names`, end to end, have a gradient on no rank."""
    everyone = [dict(model.named_parameters()) for model in models]
    unused = [all(parameters[name].grad is None for parameters in everyone) for name in names]
    return torch.cat([torch.full((everyone[0][n].numel(),), each) for n, each in zip(names, unused, strict=True)])


def taken_back(
    lost: dict[Hashable, Tensor], before: dict[Hashable, Tensor], where: Tensor, num_senders: int, subject: Hashable
) -> dict[Hashable, Tensor]:
    """What messages about a `subject` lost, but for elements `where` they came to nothing: there what they had."""
    result = dict(lost)
    for number, chunk in enumerate(chunks(where.numel(), num_senders)):
        for sender in (*range(num_senders), "mean"):
            stream = (subject, number, sender)
            if stream in lost:
                old = before.get(stream, torch.zeros_like(lost[stream]))
                result[stream] = torch.where(where[chunk], old, lost[stream])
    return result


class AllReduce(Rule):
    """g <- mean g, or the sum; with `q`, q(mean q(g))."""

    takes_buffers_of_rank_0 = True

    def __init__(
        self,
        average: bool = True,
        q: Lossy | Feedback | None = None,
        hierarchical: bool = False,
        layout: LayoutOf | None = None,
    ) -> None:
        self.average, self.q, self.hierarchical, self.layout = average, q, hierarchical, layout

    def after_backward(self, replicas: Replicas) -> None:
        layout = layout_of(replicas.models, self.layout, replicas.round)
        if isinstance(self.q, Feedback):
            numels = {name: parameter.numel() for name, parameter in replicas.models[0].named_parameters()}
            self.q.lost = moved(self.q.lost, layout, numels, len(replicas.teams(self.hierarchical)))
        for names in layout:
            flats = gathered(replicas.models, names)
            if self.q is not None:
                before = dict(self.q.lost) if isinstance(self.q, Feedback) else {}
                result = exchanged(replicas, flats, self.q, self.hierarchical, tuple(names))
                assert self.average
                if isinstance(self.q, Feedback):
                    where, num_senders = unused_elements(replicas.models, names), len(replicas.teams(self.hierarchical))
                    self.q.lost = taken_back(self.q.lost, before, where, num_senders, tuple(names))
            else:
                result = mean(flats) if self.average else total(flats).to(flats[0].dtype)
            hand_out(replicas.models, names, result)


class GatheredAllReduce(Rule):
    """g <- mean q(g): every rank encodes all it has, and what it lost comes with the next gradient of a parameter."""

    takes_buffers_of_rank_0 = True

    def __init__(
        self, q: Lossy, hierarchical: bool = False, layout: LayoutOf | None = None, feedback: bool = True
    ) -> None:
        self.q, self.hierarchical, self.layout, self.feedback = q, hierarchical, layout, feedback

    def start(self, replicas: Replicas) -> None:
        parameters = dict(replicas.models[0].named_parameters())
        zeros = {name: torch.zeros_like(each).reshape(-1) for name, each in parameters.items()}
        self.lost = [dict(zeros) for _ in replicas.teams(self.hierarchical)]

    def after_backward(self, replicas: Replicas) -> None:
        teams = replicas.teams(self.hierarchical)
        for names in layout_of(replicas.models, self.layout, replicas.round):
            flats = gathered(replicas.models, names)
            decoded = []
            for lost, team in zip(self.lost, teams, strict=True):
                wanted = mean([flats[rank] for rank in team]) + torch.cat([lost[name] for name in names])
                decoded.append(self.q(wanted))
                left = wanted - decoded[-1] if self.feedback else torch.zeros_like(wanted)
                left = torch.where(unused_elements(replicas.models, names), torch.cat([lost[n] for n in names]), left)
                lost.update(zip(names, left.split([lost[name].numel() for name in names]), strict=True))
            result = mean(decoded, [len(team) for team in teams]) if len(teams) > 1 else mean(flats)
            hand_out(replicas.models, names, result)


class QAdam(Rule):
    """Adam on the mean gradient for `warmup` steps; then the second moment rests and q(mean q(m)) is the first.

    Elements whose v is 0 then stay as they are. Steps of a parameter count from 1, those without a gradient on any rank
    left out; the bias correction of v stays that of the warm-up's last. A step that one rank skips is skipped by all.
    Moments travel in the parameters' order.
    """

    takes_buffers_of_rank_0 = True

    def __init__(
        self,
        q: Lossy | Feedback,
        warmup: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hierarchical: bool = False,
    ) -> None:
        self.q, self.warmup, self.lr, self.betas, self.eps = q, warmup, lr, betas, eps
        self.weight_decay, self.hierarchical = weight_decay, hierarchical

    def start(self, replicas: Replicas) -> None:
        zeros = {name: torch.zeros_like(p) for name, p in replicas.models[0].named_parameters() if p.requires_grad}
        self.first = [dict(zeros) for _ in range(replicas.size)]
        self.second = dict(zeros)
        self.num_first, self.num_second = dict.fromkeys(zeros, 0), dict.fromkeys(zeros, 0)
        self.num_steps = 0

    def after_backward(self, replicas: Replicas) -> None:
        if self.num_steps < self.warmup:
            AllReduce().after_backward(replicas)

    def before_step(self, replicas: Replicas) -> None:
        if replicas.skipping:
            return
        beta1, beta2 = self.betas
        everyone = [dict(model.named_parameters()) for model in replicas.models]
        self.used = {name for name in self.second if any(each[name].grad is not None for each in everyone)}
        for name in self.used:
            for rank, parameters in enumerate(everyone):
                parameter = parameters[name]
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradient = gradient + self.weight_decay * parameter
                self.first[rank][name] = beta1 * self.first[rank][name] + (1 - beta1) * gradient
            self.num_first[name] += 1
            if self.num_steps < self.warmup:
                self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient * gradient
                self.num_second[name] += 1
        if self.num_steps >= self.warmup:
            flats = [torch.cat([moment.reshape(-1) for moment in own.values()]) for own in self.first]
            before = dict(self.q.lost) if isinstance(self.q, Feedback) else {}
            common = exchanged(replicas, flats, self.q, self.hierarchical)
            if isinstance(self.q, Feedback):
                where, num_senders = (
                    unused_elements(replicas.models, list(self.second)),
                    len(replicas.teams(self.hierarchical)),
                )
                self.q.lost = taken_back(self.q.lost, before, where, num_senders, None)
            start = 0
            for name, moment in self.second.items():
                part = common[start : start + moment.numel()].view(moment.shape)
                start += moment.numel()
                for own in self.first:
                    own[name] = part if name in self.used else own[name]
        self.num_steps += 1

    def step(self, replicas: Replicas, rank: int) -> None:
        if replicas.skipping:
            return
        beta1, beta2 = self.betas
        parameters = dict(replicas.models[rank].named_parameters())
        with torch.no_grad():
            for name in self.used:
                first = self.first[rank][name] / (1 - beta1 ** self.num_first[name])
                second = self.second[name] / (1 - beta2 ** self.num_second[name])
                parameters[name] -= self.lr * first / (second.sqrt() + self.eps) * (second != 0)
