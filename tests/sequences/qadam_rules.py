"""What QAdam owes its replicas: see `rules`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from oracles.algorithms.simulation import chunks
from sequences.compressed_rules import Shares, flat_of, lossy_mean
from sequences.rules import MeanGradients, Rule, Waiting, average_gradients, eight_bits


class QAdam(MeanGradients):
    """Mean gradients in the warm-up; then q(mean q(m)), before the step, is the first moment of everyone.

    Moments travel in the order of the trainable parameters, chunk r through rank r.
    """

    kept = ("was_warm",)
    was_warm = has_begun = has_optimizer = flags_pending = False

    def begin(self) -> None:
        if not self.has_begun:
            self.has_optimizer = self.rank.knows_optimizer
        self.has_begun = True

    @property
    def is_warm(self) -> bool:
        return self.rank.adam().is_warm if self.has_optimizer else self.was_warm

    def state(self) -> dict[str, Any]:
        return super().state() | {"was_warm": self.is_warm}

    def open(self) -> Waiting:
        yield from self.settle()

    def end(self) -> Waiting:
        self.flags_pending = self.is_warm
        if not self.is_warm:
            yield from average_gradients(self.rank)

    def settle(self) -> Waiting:
        if self.flags_pending:
            self.flags_pending = False
            yield from self.exchange_flags(stepping=False)

    def before_collective(self) -> Waiting:
        if self.flags_pending:
            any_stepping, _ = yield from self.exchange_flags(stepping=False)
            self.flags_pending = not any_stepping

    def exchange_flags(self, stepping: bool, skips: bool = False) -> Generator[Any, Any, tuple[bool, bool]]:
        """Whether any rank steps, and whether any does not; otherwise what any rank uses gets a gradient on all."""
        trained = [(name, each) for name, each in self.rank.model.named_parameters() if each.requires_grad]
        self.used = {name for name, each in trained if each.grad is not None}
        everyone = yield from self.rank.exchange("flags", (self.used, stepping, skips or not stepping))
        any_skips = any(skipping for *_, skipping in everyone)
        self.used = {name for names, *_ in everyone for name in names}
        for name, parameter in trained:
            if not any_skips and name in self.used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return any(stepping for _, stepping, _ in everyone), any_skips

    def before_step(self) -> Waiting:
        adam = self.rank.adam()
        self.has_optimizer, self.leaves_out_step = True, False
        if not adam.is_warm:
            return
        self.flags_pending = False
        _, any_skips = yield from self.exchange_flags(True, adam.found_infinity or self.rank.skips_step)
        if any_skips:
            adam.found_infinity = self.leaves_out_step = True
            return
        trained = [(name, each) for name, each in self.rank.model.named_parameters() if each.requires_grad]
        used_anywhere = self.used
        adam.fold()
        moments = [adam.first(name) for name, _ in trained]
        everyone = yield from self.rank.exchange("moments", torch.cat([each.reshape(-1) for each in moments]))
        is_used = [
            torch.full((each.numel(),), name in used_anywhere) for (name, _), each in zip(trained, moments, strict=True)
        ]
        mean = yield from self.quantised_mean(everyone, torch.cat(is_used), [name for name, _ in trained])
        pieces = torch.split(mean, [each.numel() for each in moments])
        for (name, _), moment, piece in zip(trained, moments, pieces, strict=True):
            if name in used_anywhere:
                moment.copy_(piece.view(moment.shape))

    def quantised_mean(self, everyone: list[Tensor], is_used: Tensor, names: list[str]) -> Generator[Any, Any, Tensor]:
        """The mean of the moments of `names`, end to end; of an element that nobody uses it comes to nothing."""
        parts = []
        for chunk in chunks(everyone[0].numel(), len(everyone)):
            arrived = [eight_bits(each[chunk]) for each in everyone]
            parts.append(eight_bits(sum(arrived) / len(arrived)))  # type: ignore[arg-type]
        yield from ()
        return torch.cat(parts)


class LossyQAdam(QAdam):
    """As QAdam, with fewer bits, and what messages lost of a parameter added to the next, until it is frozen."""

    kept = ("was_warm", "lost", "lost_of_mean")

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.lost: Shares = {}
        self.lost_of_mean: Shares = {}

    def quantised_mean(self, everyone: list[Tensor], is_used: Tensor, names: list[str]) -> Waiting:
        like = {name: each.detach() for name, each in self.rank.model.named_parameters()}
        lost_here, lost_of_mean = (flat_of(each, like, names) for each in (self.lost, self.lost_of_mean))
        lost = yield from self.rank.exchange("lost", lost_here)
        mean, now, of_mean = lossy_mean(self.choice.name, everyone, lost, lost_of_mean)
        numels = [like[name].numel() for name in names]
        kept = torch.where(is_used, now[self.rank.number], lost_here), torch.where(is_used, of_mean, lost_of_mean)
        self.lost, self.lost_of_mean = (dict(zip(names, each.split(numels), strict=True)) for each in kept)
        return mean


QADAM: dict[str, type[Rule]] = {"qadam": QAdam, "qadam_sign": LossyQAdam, "qadam_topk": LossyQAdam}
