"""Rules of algorithms that send a few bits or a few elements; they share the compressor with the library."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from oracles.algorithms.gradients import QAdam, unused_elements
from oracles.algorithms.simulation import Feedback, Lossy, Replicas, Rule, chunks, mean, there_and_back
from oracles.algorithms.weights import DiLoCo


class FeedbackByStream(Feedback):
    """Where each stream has an encoder of its own, which counts what it sends."""

    def __init__(self, make: Callable[[], Any], feedback: bool = True) -> None:
        super().__init__(torch.clone)
        self.make, self.feedback = make, feedback
        self.of_stream: dict[Hashable, Lossy] = {}

    def send(self, tensor: Tensor, stream: Hashable) -> Tensor:
        self.q = self.of_stream.setdefault(stream, there_and_back(self.make()))
        return super().send(tensor, stream) if self.feedback else self.q(tensor.clone())


class MajorityVote(Rule):
    """g <- 1 where at least half of the ranks have a gradient of zero or more, and -1 elsewhere."""

    takes_buffers_of_rank_0 = True

    def after_backward(self, replicas: Replicas) -> None:
        for parameters in zip(*(model.parameters() for model in replicas.models), strict=True):
            total = torch.stack([torch.where(each.grad >= 0, 1.0, -1.0) for each in parameters]).sum(0)
            for each in parameters:
                each.grad = torch.where(total >= 0, 1.0, -1.0).to(each.dtype)


def majority(opinions: list[list[float]], block_size: int) -> list[float]:
    """The vote of ranks that hold `opinions`, element by element; one rank alone keeps what it holds.

    Blocks are cut from each rank's chunk. A rank whose block is all zeros abstains; zero is a vote for plus. A tie is
    plus as well, unless all elements of the block tie.
    """
    if len(opinions) == 1:
        return list(opinions[0])
    result: list[float] = []
    for chunk in chunks(len(opinions[0]), len(opinions)):
        for start in range(chunk.start, chunk.stop, block_size):
            block = range(start, min(start + block_size, chunk.stop))
            voters = [own for own in opinions if any(own[place] != 0 for place in block)]
            ahead = [sum(1 if own[place] >= 0 else -1 for own in voters) for place in block]
            all_tie = not any(ahead)
            result += [0.0 if all_tie else 1.0 if each >= 0 else -1.0 for each in ahead]
    return result


class GatheredDiLoCo(DiLoCo):
    """As DiLoCo, with mean q(theta - x)."""

    def __init__(self, interval: int, q: Lossy) -> None:
        super().__init__(interval)
        self.gathered = q

    def common(self, changes: list[Tensor]) -> Tensor:
        return mean([self.gathered(each) for each in changes])


class Apart(Feedback):
    """Loses nothing, and remembers what each sender sent of each chunk."""

    def __init__(self) -> None:
        super().__init__(torch.clone)
        self.sent: dict[Hashable, Tensor] = {}

    def send(self, tensor: Tensor, stream: Hashable) -> Tensor:
        self.sent[stream] = tensor.clone()
        return tensor.clone()

    def take(self, num_senders: int) -> list[Tensor]:
        chunks = range(num_senders)
        found = [torch.cat([self.sent[None, chunk, sender] for chunk in chunks]) for sender in range(num_senders)]
        self.sent = {}
        return found


class GatheredQAdam(QAdam):
    """As QAdam, with mean q(m + e), where e is what q lost of a sender's moments before."""

    def __init__(self, q: Lossy, warmup: int, **choices: Any) -> None:
        self.apart = Apart()
        super().__init__(self.apart, warmup, **choices)  # type: ignore[arg-type]
        self.gathered = q
        self.lost: list[Tensor] = []

    def before_step(self, replicas: Replicas) -> None:
        super().before_step(replicas)
        if not self.apart.sent:  # it warms up, a step is skipped, or there is one sender
            return
        teams = replicas.teams(self.hierarchical)
        flats = self.apart.take(len(teams))
        self.lost = self.lost or [torch.zeros_like(flat) for flat in flats]
        wanted = [flat + lost for flat, lost in zip(flats, self.lost, strict=True)]
        decoded = [self.gathered(each) for each in wanted]
        unused = unused_elements(replicas.models, list(self.second))
        left = [each - gone for each, gone in zip(wanted, decoded, strict=True)]
        self.lost = [torch.where(unused, before, now) for before, now in zip(self.lost, left, strict=True)]
        parts = mean(decoded, [len(team) for team in teams]).split([moment.numel() for moment in self.second.values()])
        for name, part in zip(self.second, parts, strict=True):
            if name in self.used:
                for own in self.first:
                    own[name] = part.view_as(own[name])
