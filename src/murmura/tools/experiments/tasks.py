"""The tasks of the experiments: data generated or shipped with Python, and models small enough for two cores.

A batch is a pure function of the rank and the step, so a run that is resumed at a step sees what it would have seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from murmura.errors import ConfigError
from murmura.tools.experiments.python_docs import VOCABULARY, python_docs
from murmura.tools.experiments.transformer import Transformer, initialise

Batch = tuple[Tensor, Tensor]
HELD_OUT = -1
"""The number of a virtual rank whose batches are held out."""


@dataclass(frozen=True)
class Task(ABC):
    """A model, its data on each rank, and its loss."""

    batch_size: int
    learning_rate: float  # of AdamW, for a batch of `batch_size` on each rank
    seed: int = 0  # of data and initial weights

    @property
    def floor(self) -> float | None:
        """The lowest possible loss, if it is known."""
        return None

    def model(self) -> nn.Module:
        """Return the model, with the same weights on every call."""
        model = self._model()
        initialise(model, self.seed)
        return model

    def batch(self, rank: int, step: int) -> Batch:
        """Return the inputs and targets of `rank` at `step`."""
        # Hashed, because torch's generator uses 32 bits of a seed, and similar seeds give similar first numbers.
        (number,) = np.random.SeedSequence([self.seed, rank - HELD_OUT, step]).generate_state(1)
        return self._batch(rank, torch.Generator().manual_seed(int(number)))

    def held_out(self) -> Sequence[Batch]:
        """Return the batches on which models are evaluated."""
        return [self.batch(HELD_OUT, step) for step in range(8)]

    @abstractmethod
    def _model(self) -> nn.Module: ...

    @abstractmethod
    def _batch(self, rank: int, generator: torch.Generator) -> Batch: ...

    @abstractmethod
    def loss(self, output: Tensor, targets: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Markov(Task):
    """Text of an order-2 Markov chain: each symbol depends on the two before it. Its entropy is the floor."""

    batch_size: int = 8
    learning_rate: float = 1e-2
    symbols: int = 8
    context: int = 16

    @cached_property
    def transitions(self) -> Tensor:
        """P[a, b, c]: the probability that c follows a, b."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.softmax(2 * torch.randn((self.symbols,) * 3, generator=generator, dtype=torch.float64), dim=-1)

    @cached_property
    def pairs(self) -> Tensor:
        """The probability of each pair of symbols: the stationary distribution of P."""
        likely = torch.full((self.symbols, self.symbols), 1 / self.symbols**2, dtype=torch.float64)
        for _ in range(1000):
            likely = torch.einsum("ab,abc->bc", likely, self.transitions)
        return likely

    @property
    def floor(self) -> float:
        """The entropy of a symbol, given the two before it, in nats."""
        entropies = -(self.transitions * self.transitions.log()).sum(-1)
        return float((self.pairs * entropies).sum())

    def _model(self) -> nn.Module:
        return Transformer(self.symbols, self.context, width=32, layers=1, heads=2)

    def _batch(self, rank: int, generator: torch.Generator) -> Batch:
        first = torch.multinomial(self.pairs.flatten(), self.batch_size, replacement=True, generator=generator)
        text = [first // self.symbols, first % self.symbols]
        while len(text) < self.context + 1:
            likely = self.transitions[text[-2], text[-1]]
            text.append(torch.multinomial(likely, 1, generator=generator).squeeze(1))
        whole = torch.stack(text, dim=1)
        return whole[:, :-1], whole[:, 2:]  # what follows one symbol alone cannot be known as well: no target

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output[:, 1:].flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Teacher(Task):
    """An MLP learns the noisy outputs of another MLP, on inputs with a different centre on every rank.

    Shards are not alike, as with data that stays where it was collected. The variance of the noise is the floor.
    """

    batch_size: int = 16
    learning_rate: float = 1e-2
    width: int = 16
    noise: float = 0.5
    shift: float = 1.0

    @property
    def floor(self) -> float:
        return self.noise**2

    @cached_property
    def teacher(self) -> nn.Module:
        teacher = _mlp(self.width, hidden=16)
        initialise(teacher, self.seed + 1)
        for parameter in teacher.requires_grad_(False).parameters():
            parameter.mul_(2)  # so that there is something to learn
        return teacher

    def _model(self) -> nn.Module:
        return _mlp(self.width, hidden=64)

    def _batch(self, rank: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn(self.batch_size, self.width, generator=generator)
        if rank == HELD_OUT:  # a mixture of all ranks' inputs
            centres = torch.randint(8, (self.batch_size,), generator=generator).tolist()
        else:
            centres = [rank] * self.batch_size
        inputs += self.shift * torch.stack([self._centre(each) for each in centres])
        said: Tensor = self.teacher(inputs)
        noise: Tensor = self.noise * torch.randn(said.shape, generator=generator)
        return inputs, said + noise

    def _centre(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 100 + rank)
        centre = torch.randn(self.width, generator=generator)
        return functional.normalize(centre, dim=0)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(output, targets)


@dataclass(frozen=True)
class CharLM(Task):
    """A transformer predicts Python's documentation character by character."""

    batch_size: int = 8
    learning_rate: float = 2e-3
    context: int = 64
    width: int = 128
    layers: int = 2

    def _model(self) -> nn.Module:
        return Transformer(len(VOCABULARY), self.context, self.width, self.layers, heads=4)

    def _batch(self, rank: int, generator: torch.Generator) -> Batch:
        text = python_docs()
        split = len(text) * 9 // 10
        part = text[split:] if rank == HELD_OUT else text[:split]
        starts = torch.randint(len(part) - self.context - 1, (self.batch_size,), generator=generator)
        whole = torch.stack([part[start : start + self.context + 1] for start in starts.tolist()]).long()
        return whole[:, :-1], whole[:, 1:]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def _mlp(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
    )


TASKS: dict[str, type[Task]] = {"charlm": CharLM, "markov": Markov, "mlp": Teacher}


def task_named(name: str, seed: int = 0) -> Task:
    """Return the task of that name."""
    if name not in TASKS:
        raise ConfigError(f"task {name!r} is unknown. Known: {', '.join(map(repr, TASKS))}.")
    return TASKS[name](seed=seed)  # type: ignore[call-arg]  # each has defaults for the rest
