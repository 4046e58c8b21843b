"""What the DDP benchmark trains: a character transformer and a deep MLP, on characters and numbers drawn at random.

A `Model` is a recipe: every rank builds the same parameters from it, and its own batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from murmura.tools.experiments.transformer import Transformer

SEED = 20_240_229
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model(ABC):
    """A recipe for a module, its optimizer, its data and its loss; a step of a rank sees `batch` samples."""

    batch: int
    layers: int
    width: int

    @property
    @abstractmethod
    def about(self) -> str:
        """What it is, in words."""

    @abstractmethod
    def _module(self) -> nn.Module: ...

    @abstractmethod
    def _batch(self, generator: torch.Generator) -> Batch: ...

    @abstractmethod
    def optimizer(self, module: nn.Module) -> Optimizer: ...

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor: ...

    def build(self) -> nn.Module:
        """Return the module, with the same parameters on every rank; torch's global random state is not used."""
        module = self._module()
        generator = torch.Generator().manual_seed(SEED)
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=generator)
                elif name == "bias":
                    nn.init.zeros_(parameter)
        return module

    def batches(self, rank: int, count: int) -> list[Batch]:
        """The data of `rank`."""
        generator = torch.Generator().manual_seed(SEED + 1 + rank)
        return [self._batch(generator) for _ in range(count)]

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._module().parameters())

    def num_bytes(self) -> int:
        """Of its parameters, or of its gradients."""
        return self.num_parameters() * torch.get_default_dtype().itemsize

    def described(self) -> dict[str, Any]:
        """For a report."""
        return {"about": self.about, "parameters": self.num_parameters(), "gradient_bytes": self.num_bytes()}


@dataclass(frozen=True)
class CharLM(Model):
    """A decoder-only transformer that predicts the next character."""

    batch: int = 4
    layers: int = 6
    width: int = 256
    heads: int = 8
    context: int = 32
    vocabulary: int = 96

    @property
    def about(self) -> str:
        return (
            f"character transformer: {self.layers} layers of width {self.width} with {self.heads} heads, "
            f"{self.batch} x {self.context} characters a rank, fused AdamW"
        )

    def _module(self) -> nn.Module:
        return Transformer(self.vocabulary, self.context, self.width, self.layers, self.heads)

    def _batch(self, generator: torch.Generator) -> Batch:
        text = torch.randint(self.vocabulary, (self.batch, self.context + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def optimizer(self, module: nn.Module) -> Optimizer:
        return AdamW(module.parameters(), lr=1e-4, fused=True)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class MLP(Model):
    """Square linear layers with ReLU between them."""

    batch: int = 32
    layers: int = 24
    width: int = 512
    momentum: float = 0.9

    @property
    def about(self) -> str:
        optimizer = "SGD with momentum" if self.momentum else "plain SGD"
        return f"MLP: {self.layers} linear layers of width {self.width}, {self.batch} rows a rank, {optimizer}"

    def _module(self) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(self.layers):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def _batch(self, generator: torch.Generator) -> Batch:
        shape = (self.batch, self.width)
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)

    def optimizer(self, module: nn.Module) -> Optimizer:
        return SGD(module.parameters(), lr=1e-3, momentum=self.momentum)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)


MODELS: dict[str, Model] = {"charlm": CharLM(), "mlp": MLP()}
