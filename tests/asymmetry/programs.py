"""Random training programs in which every rank does something else, and how a rank runs one.

A program is drawn from a seed as plain data, the same on every rank. Most of what ranks do differently is legal: which
heads they use and freeze, how they accumulate and synchronise, how they zero gradients, how much data they have. A
fault is what a correct loop would not do: to leave out a round, to run one too many, to swallow an error, to change
the model alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ddp.models import digest, fill, values
from murmura import DDP, MurmuraError, Transport
from murmura.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from murmura.compressors import ErrorFeedback, MinMaxUInt8

NUM_HEADS = 4  # the last one is frozen when the model is wrapped
WIDTH = 4
LATE = NUM_HEADS - 1

# Those that exchange gradients see in every bucket whether ranks are in the same round; the others come last, and are
# given legal programs only.
ALGORITHMS: tuple[Algorithm, ...] = (
    GradientAllReduceAlgorithm(),
    GradientAllReduceAlgorithm(average=False),
    ByteGradAlgorithm(compressor=ErrorFeedback(MinMaxUInt8())),
    DecentralizedAlgorithm(communication_interval=2),
    DecentralizedAlgorithm(peer_selection_mode="shift_one"),
    LowPrecisionDecentralizedAlgorithm(),
    AsyncModelAverageAlgorithm(sync_interval_rounds=2),
    LocalSGDAlgorithm(3),
    DiLoCoAlgorithm(2),
)
NUM_OF_GRADIENTS = 3
WAYS = ("backward", "by hand", "all in flight")
FAULTS = ("skips the round", "runs a round too many", "swallows an error", "thaws alone", "changes a weight")


@dataclass(frozen=True)
class Turn:
    """What one rank does in one step."""

    uses: tuple[tuple[int, ...], ...]  # the heads of each micro-batch, in the order they are computed
    frozen: tuple[int, ...]
    way: str
    zeroes: str  # "none", "zeros", or "" for not at all
    looks: tuple[str, ...]  # forwards that lead to no backward, before the first that does
    fault: str = ""


@dataclass(frozen=True)
class Epoch:
    """A loop over uneven data; the heads depend on rank and batch."""

    lengths: tuple[int, ...]
    accumulate: int


@dataclass(frozen=True)
class Program:
    seed: int
    num_ranks: int
    algorithm: int
    has_norm: bool
    bucket_bytes: int
    uses_adam: bool
    thaws_at: int  # the step before which every rank thaws the last head
    steps: tuple[tuple[Turn, ...] | Epoch, ...]

    @property
    def faults(self) -> list[str]:
        return [turn.fault for step in self.steps if not isinstance(step, Epoch) for turn in step if turn.fault]


def draw_program(seed: int, *, faulty: bool) -> Program:
    """The program of a seed, with one or two faults in it or none."""
    chance = random.Random(seed)
    num_ranks = chance.choice((2, 2, 3, 4))
    num_steps = chance.randint(4, 8)
    thaws_at = chance.randint(0, num_steps)
    steps: list[tuple[Turn, ...] | Epoch] = []
    for step in range(num_steps):
        if chance.random() < 0.2:
            lengths = tuple(chance.randint(1, 4) for _ in range(num_ranks))
            steps.append(Epoch(lengths, chance.choice((1, 1, 2))))
        else:
            steps.append(tuple(_draw_turn(chance, step >= thaws_at) for _ in range(num_ranks)))
    for _ in range(chance.choice((1, 1, 2)) if faulty else 0):
        at = chance.choice([index for index, step in enumerate(steps) if not isinstance(step, Epoch)] or [-1])
        if at < 0:
            steps.append(tuple(_draw_turn(chance, True) for _ in range(num_ranks)))
            thaws_at = min(thaws_at, num_steps)
        turns = list(steps[at])
        rank = chance.randrange(num_ranks)
        turns[rank] = replace(turns[rank], fault=chance.choice(FAULTS))
        steps[at] = tuple(turns)
    return Program(
        seed=seed,
        num_ranks=num_ranks,
        algorithm=chance.randrange(NUM_OF_GRADIENTS if faulty else len(ALGORITHMS)),
        has_norm=chance.random() < 0.5,
        bucket_bytes=chance.choice((1, 100, 2**20)),
        uses_adam=chance.random() < 0.5,
        thaws_at=thaws_at,
        steps=tuple(steps),
    )


def _draw_turn(chance: random.Random, is_thawed: bool) -> Turn:
    heads = range(NUM_HEADS if is_thawed else LATE)
    return Turn(
        uses=tuple(tuple(chance.sample(heads, chance.randint(0, len(heads)))) for _ in range(chance.randint(1, 3))),
        frozen=tuple(head for head in range(LATE) if chance.random() < 0.15),
        way=chance.choice(WAYS),
        zeroes=chance.choice(("none", "none", "zeros", "")),
        looks=tuple(chance.choice(("no_grad", "eval", "train")) for _ in range(chance.choice((0, 0, 0, 1, 2)))),
    )


class Swallowed(ArithmeticError):
    """What the middle of a backward raises when a rank is to swallow an error."""


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise Swallowed


class Model(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if has_norm else nn.Identity()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_HEADS))
        self.heads[LATE].requires_grad_(False)

    def forward(self, x: Tensor, use: Sequence[int] = (), breaks: bool = False) -> Tensor:
        out = self.norm(self.trunk(x))
        if breaks:
            out = _Raising.apply(out)
        for index in use:
            out = out + self.heads[index](x)
        return out


class Rank:
    """One rank on its way through a program."""

    def __init__(self, transport: Transport, program: Program) -> None:
        self.rank = transport.rank
        self.program = program
        self.model = fill(Model(program.has_norm), seed=self.rank)
        self.ddp = DDP(
            self.model,
            transport,
            algorithm=ALGORITHMS[program.algorithm],
            bucket_size_bytes=program.bucket_bytes,
        )
        parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
            if program.uses_adam
            else torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1)
        )
        self.num_batches = 0

    def run(self) -> str:
        """Run the program and return a digest of the weights, or of their mean where replicas may differ."""
        for number, step in enumerate(self.program.steps):
            if number == self.program.thaws_at:
                self.model.heads[LATE].requires_grad_(True)
                if self.exchanges_weights:
                    self.ddp.set_algorithm(ALGORITHMS[self.program.algorithm])
            if isinstance(step, Epoch):
                self.run_epoch(step)
            else:
                self.run_turn(step[self.rank])
        if self.exchanges_weights:
            with self.ddp.average_parameters():
                return digest(self.model.parameters())
        self.ddp.verify_in_sync()
        return digest(self.model.parameters())

    @property
    def exchanges_weights(self) -> bool:
        return self.program.algorithm >= NUM_OF_GRADIENTS

    def batch(self) -> Tensor:
        self.num_batches += 1
        return values(3, WIDTH, seed=1000 * self.program.seed + 100 * self.rank + self.num_batches)

    def loss(self, use: Sequence[int], breaks: bool = False) -> Tensor:
        return self.ddp(self.batch(), use, breaks).square().mean()

    def run_turn(self, turn: Turn) -> None:
        if turn.zeroes:
            self.optimizer.zero_grad(set_to_none=turn.zeroes == "none")
        for head in turn.frozen:
            self.model.heads[head].requires_grad_(False)
        if turn.fault == "thaws alone":
            self.model.heads[LATE].requires_grad_(not self.model.heads[LATE].weight.requires_grad)
        if turn.fault == "changes a weight":
            with torch.no_grad():
                self.model.trunk.bias[0] += 1
        for look in turn.looks:
            self.look(look)
        if turn.fault != "skips the round":
            self.run_round(turn)
        if turn.fault == "runs a round too many":
            self.loss(turn.uses[-1]).backward()
        for head in turn.frozen:
            self.model.heads[head].requires_grad_(True)
        self.optimizer.step()

    def look(self, look: str) -> None:
        if look == "eval":
            self.ddp.eval()
        with torch.set_grad_enabled(look != "no_grad"):
            self.ddp(self.batch())
        self.ddp.train()

    def run_round(self, turn: Turn) -> None:
        *earlier, last = turn.uses
        with self.ddp.no_sync():
            for use in earlier:
                self.loss(use).backward()
        try:
            if turn.way == "backward":
                self.loss(last, turn.fault == "swallows an error").backward()
                return
            with self.ddp.no_sync():
                self.loss(last, turn.fault == "swallows an error").backward()
        except Swallowed:
            return
        if turn.way == "by hand":
            self.ddp.sync_gradients()
        else:
            self.ddp.overlapped_sync_gradients()

    def run_epoch(self, epoch: Epoch) -> None:
        self.optimizer.zero_grad()
        batches = [self.batch() for _ in range(epoch.lengths[self.rank])]
        count = 0
        for count, batch in enumerate(self.ddp.join(batches), start=1):
            use = [(count + self.rank) % LATE]
            if count % epoch.accumulate:
                with self.ddp.no_sync():
                    self.ddp(batch, use).square().mean().backward()
            else:
                self.ddp(batch, use).square().mean().backward()
                self.finish_step()
        if count % epoch.accumulate:
            self.ddp.sync_gradients()
            self.finish_step()

    def finish_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class End:
    """How a rank's program ended: with a digest of its weights, or with an error of the library."""

    digest: str = ""
    error: str = ""


def run_program(transport: Transport, program: Program, deadline: float) -> End:
    """What runs on every rank; errors that are not the library's own go through."""
    transport.timeout = deadline
    rank: Rank | None = None
    try:
        rank = Rank(transport, program)
        return End(digest=rank.run())
    except MurmuraError as error:
        return End(error=f"{type(error).__name__}: {error}")
    finally:
        if rank is not None:
            rank.ddp.close()
