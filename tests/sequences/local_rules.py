"""What more algorithms owe their replicas: votes on gradients, moments that are averaged, fragments in turn."""

from __future__ import annotations

import torch
from torch import Tensor

from oracles.algorithms.simulation import chunks
from sequences.compressed_rules import LossyGradients, Shares, flat_of, lossy_mean
from sequences.rules import AfterStep, LocalSGD, Rule, Waiting, Weights, mean_of

Piece = tuple[str, int, int]
"""A tensor's name, and which of its elements: from here, up to there."""


class MajorityVote(LossyGradients):
    """g <- 1 where at least half of the ranks have a gradient of zero or more, and -1 elsewhere."""

    def mean(self, everyone: list[Shares], used: set[str]) -> Waiting:
        names = self.rank.next_layout()
        values = [flat_of(each, each, names) for each in everyone]
        nothing = torch.zeros_like(values[0])
        mean, _, _ = lossy_mean(self.choice.name, values, [nothing] * len(values), nothing)
        parts = mean.split([everyone[0][each].numel() for each in names])
        yield from ()
        return {each: part.view_as(everyone[0][each]) for each, part in zip(names, parts, strict=True)}


class WithMoments(LocalSGD):
    """As LocalSGD; with the weights goes what optimizers remember, once all ranks have begun a step, saved, or loaded.

    Until then it waits, and goes alone after the first round in which they have.
    """

    kept = ("is_owed",)
    is_owed = False

    def begin(self) -> None:
        super().begin()
        self.due: list[int] = []

    def is_due(self, number: int) -> bool:
        return super().is_due(number) or self.is_owed

    def end(self) -> Waiting:
        yield from super().end()
        if self.is_last_due:
            self.due.append(self.rank.round)

    def communicate(self) -> Waiting:
        number = self.due.pop(0)
        if super().is_due(number):
            yield from super().communicate()
        self.is_owed = not all((yield from self.rank.exchange("known", self.rank.knows_optimizer)))
        if not self.is_owed:
            yield from self.rank.average_moments()
        elif number + 1 < self.rank.round and number + 1 not in self.due:  # ended here, perhaps not elsewhere
            self.due.insert(0, number + 1)
            self.num_pending += 1
            self.is_last_due |= number + 2 == self.rank.round


class Streaming(AfterStep):
    """One of `fragments` at a time: d = mean(theta - x); v <- 0.9 v + d; theta <- theta - 0.7 (d + 0.9 v).

    A round later x <- (x + theta) / 2. Buffers go with the last fragment; their mean stands for theta. Nobody waits for
    the others before that: a rank that has stepped sends its vote before its fragment and goes on, but for the first
    exchange after other weights were loaded. What is in flight then, or when the algorithm is left, is void.
    """

    kept = ("theta", "velocity", "pieces", "arrived")
    overlap = 1
    is_in_step = False

    def begin(self) -> None:
        super().begin()
        self.fragments = min(2, self.choice.interval)
        self.due: list[int] = []
        self.theta: Weights = {}
        self.velocity: Weights = {}
        self.lost: Weights = {}
        self.lost_of_mean: Weights = {}
        self.take_in([name for name, _ in self.rank.included()])
        self.key: object = None  # of the fragment that travels
        self.pieces: list[Piece] = []
        self.arrived: list[Tensor] = []  # what these pieces are to become

    def take_in(self, names: list[str]) -> None:
        for name, each in self.rank.included():
            if name in names:
                self.theta[name] = each.detach().clone()
                self.velocity[name] = torch.zeros_like(each)

    # When

    def fragment_after(self, number: int) -> int | None:
        interval = self.choice.interval
        for index in range(self.fragments):
            end = (index + 1) * interval // self.fragments
            if (number + 1) % interval == (end - self.overlap) % interval:
                return index
        return None

    def is_due(self, number: int) -> bool:
        return any(self.fragment_after(each) is not None for each in (number, number - self.overlap))

    def end(self) -> Waiting:
        yield from super().end()
        if self.is_last_due:
            self.due.append(self.rank.round)

    def before_step(self) -> Waiting:
        yield from self.communicate_all_but(int(self.is_last_due))

    def after_step(self) -> Waiting:
        yield from self.communicate_all_but(0)
        self.is_in_step = self.rank.was_late  # and settles once more

    def settle(self, num_left: int = 0) -> Waiting:
        yield from self.communicate_all_but(num_left)
        if not self.is_in_step:  # all ranks come here, so that it does not matter that the library does not wait
            yield from self.arrive()
        self.is_in_step = False

    def communicate_all_but(self, num_left: int) -> Waiting:
        while self.num_pending > num_left:
            if self.is_restarted:
                yield from self.rank.exchange("votes", True)
            elif self.fragment_after(self.due[0]) is not None:
                self.rank.post("votes beside", True)
            self.num_pending -= 1
            yield from self.communicate()

    def before_collective(self) -> Waiting:
        while self.num_pending:
            if not self.is_restarted and self.fragment_after(self.due[0]) is None:
                return  # nobody waits for what is only taken over
            votes = yield from self.rank.exchange("votes" if self.is_restarted else "votes beside", False)
            if not any(votes):
                return
            self.num_pending -= 1
            yield from self.communicate()

    # What

    def communicate(self) -> Waiting:
        number = self.due.pop(0)
        self.theta = yield from self.start_from_mean(self.theta)
        yield from self.arrive()
        self.take_over()
        index = self.fragment_after(number)
        if index is None:
            return
        now = self.rank.weights()
        self.pieces = list(self.pieces_of(now, index))
        own = {
            piece: part(self.theta, piece) - part(now, piece) if piece[0] in self.theta else part(now, piece)
            for piece in self.pieces
        }
        self.key = self.rank.post("fragments", (own, self.lost_of(self.lost)))

    def pieces_of(self, now: Weights, index: int) -> list[Piece]:
        chunk = chunks(sum(each.numel() for each in self.theta.values()), self.fragments)[index]
        names = [name for name in now if name in self.theta]
        found, start = [], 0
        for name in names:
            first, last = max(chunk.start - start, 0), min(chunk.stop - start, now[name].numel())
            if first < last:
                found.append((name, first, last))
            start += now[name].numel()
        if index == self.fragments - 1:
            found += [(name, 0, now[name].numel()) for name in now if name not in self.theta]
        return found

    def arrive(self) -> Waiting:
        """Wait for the fragment that travels, and move theta; the weights take it over in its time."""
        if self.key is None:
            return
        everyone = yield self.key
        self.key, self.arrived = None, []
        for piece, change in self.mean([own for own, _ in everyone], [lost for _, lost in everyone]).items():
            if piece[0] in self.theta:
                velocity, theta = part(self.velocity, piece), part(self.theta, piece)
                velocity.copy_(0.9 * velocity + change)
                theta.copy_(theta - 0.7 * (change + 0.9 * velocity))
                self.arrived.append(theta.clone())
            else:
                self.arrived.append(change)

    def mean(self, everyone: list[dict[Piece, Tensor]], lost: list[Tensor]) -> dict[Piece, Tensor]:
        return mean_of(everyone)  # type: ignore[arg-type, return-value]

    def lost_of(self, lost: Weights) -> Tensor:
        """What messages lost of the pieces under way, end to end."""
        return torch.cat([part(lost, piece) for piece in self.pieces if piece[0] in lost] or [torch.zeros(0)])

    def take_over(self) -> None:
        now = self.rank.weights()
        for piece, new in zip(self.pieces, self.arrived, strict=True):
            x = part(now, piece)
            x.copy_((x + new) / 2)
        self.rank.write({name: now[name] for name, *_ in self.pieces})
        self.pieces, self.arrived = [], []


class LossyStreaming(Streaming):
    """As Streaming, with few bits, and what messages lost added to the next; buffers go as they are."""

    kept = (*Streaming.kept, "lost", "lost_of_mean")

    def take_in(self, names: list[str]) -> None:
        super().take_in(names)
        for name in names:
            self.lost[name], self.lost_of_mean[name] = (torch.zeros_like(self.theta[name]) for _ in range(2))

    def mean(self, everyone: list[dict[Piece, Tensor]], lost: list[Tensor]) -> dict[Piece, Tensor]:
        pieces = [piece for piece in self.pieces if piece[0] in self.theta]
        values = [torch.cat([own[piece] for piece in pieces]) for own in everyone]
        mean, now, of_mean = lossy_mean(self.choice.name, values, lost, self.lost_of(self.lost_of_mean))
        numels = [last - first for _, first, last in pieces]
        for piece, own, common in zip(pieces, now[self.rank.number].split(numels), of_mean.split(numels), strict=True):
            part(self.lost, piece).copy_(own)
            part(self.lost_of_mean, piece).copy_(common)
        return super().mean(everyone, lost) | dict(zip(pieces, mean.split(numels), strict=True))


def part(values: Weights, piece: Piece) -> Tensor:
    name, first, last = piece
    return values[name].view(-1)[first:last]


LOCAL: dict[str, type[Rule]] = {
    "majority_vote": MajorityVote,
    "average_moments": WithMoments,
    "streaming_diloco": Streaming,
    "streaming_uint4": LossyStreaming,
}
