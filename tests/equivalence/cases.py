"""Models, data and optimizers of the equivalence suite; each a function of a seed, equal in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ddp.models import fill, values
from oracles.ddp import Shard

BATCH = 4  # samples of one rank


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Transformer(nn.Module):
    """One block with causal attention; the matrix that embeds tokens also predicts them."""

    def __init__(self, num_tokens: int = 11, width: int = 8, num_heads: int = 2, length: int = 5) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.embed = nn.Embedding(num_tokens, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.before_attention, self.before_mlp, self.last = (nn.LayerNorm(width) for _ in range(3))
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, num_tokens, bias=False)
        self.head.weight = self.embed.weight

    def attend(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(x).chunk(3, dim=-1)
        queries, keys, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(queries, keys, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        x = x + self.attend(self.before_attention(x))
        x = x + self.mlp(self.before_mlp(x))
        return self.head(self.last(x))


class Cnn(nn.Module):
    """Convolutions with BatchNorm, which sees the batch of its own rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.BatchNorm2d(4),
            nn.Flatten(),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": Mlp, "transformer": Transformer, "cnn": Cnn}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.003),
}


@dataclass(frozen=True)
class Case:
    """What is trained; `bucket_bytes` is so small that there are several buckets."""

    model: str
    optimizer: str
    dtype: torch.dtype = torch.float64
    num_steps: int = 100
    bucket_bytes: int = 1000

    def make_model(self, seed: int = 0) -> nn.Module:
        return fill(MODELS[self.model](), seed).to(self.dtype)

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        return OPTIMIZERS[self.optimizer](model)

    def shard(self, step: int, rank: int) -> Shard:
        seed = 1000 * step + 2 * rank
        generator = torch.Generator().manual_seed(seed)
        if self.model == "transformer":
            tokens = torch.randint(0, 11, (BATCH, 6), generator=generator)
            return tokens[:, :-1], tokens[:, 1:]
        shape = (BATCH, 2, 6, 6) if self.model == "cnn" else (BATCH, 6)
        return values(*shape, seed=seed, dtype=self.dtype), torch.randint(0, 3, (BATCH,), generator=generator)

    def steps(self, num_ranks: int) -> list[list[Shard]]:
        return [[self.shard(step, rank) for rank in range(num_ranks)] for step in range(self.num_steps)]

    def __str__(self) -> str:
        return f"{self.model}-{self.optimizer}"


def loss_of(model: nn.Module, shard: Shard) -> Tensor:
    inputs, targets = shard
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
