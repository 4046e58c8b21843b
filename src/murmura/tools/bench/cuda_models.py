"""What the DDP benchmark trains on a GPU: large enough for the GPU to be busy, on numbers drawn at random there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SEED = 20_240_229


@dataclass(frozen=True)
class CudaModel(ABC):
    """A recipe: every rank builds the same parameters from it, and its own data. A step of a rank sees `batch` rows."""

    batch: int

    @property
    @abstractmethod
    def about(self) -> str:
        """What it is, in words."""

    @abstractmethod
    def module(self) -> nn.Module:
        """The module, as torch's random numbers make it, on the device that is torch's default."""

    @abstractmethod
    def data(self) -> Tensor:
        """The rows of a step, on the GPU."""

    @abstractmethod
    def loss(self, module: nn.Module, data: Tensor) -> Tensor:
        """The forward pass and the loss."""

    def build(self) -> nn.Module:
        """The module on the GPU; its parameters are the same on every rank."""
        torch.manual_seed(SEED)
        with torch.device("cuda"):
            return self.module()

    def described(self) -> dict[str, Any]:
        """For a report."""
        with torch.device("meta"):
            parameters = list(self.module().parameters())
        return {
            "about": self.about,
            "parameters": sum(each.numel() for each in parameters),
            "parameter_tensors": len(parameters),
        }


@dataclass(frozen=True)
class DeepMLP(CudaModel):
    """Twelve square linear layers: 192 MiB of gradients in few large parameters."""

    batch: int = 8192
    layers: int = 12
    width: int = 2048

    @property
    def about(self) -> str:
        return f"MLP: {self.layers} linear layers of width {self.width}, {self.batch} rows a rank, fp32"

    def module(self) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(self.layers):
            layers += [nn.Linear(self.width, self.width), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def data(self) -> Tensor:
        return torch.randn(self.batch, self.width, device="cuda")

    def loss(self, module: nn.Module, data: Tensor) -> Tensor:
        loss: Tensor = module(data).square().mean()
        return loss


class _Block(nn.Module):
    """One layer of a transformer, with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.queries_keys_values(self.norms[0](x)).view(rows, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        fed: Tensor = self.feed_forward(self.norms[1](x))
        return x + fed


class _LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*[_Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens) + self.positions)))
        return logits


@dataclass(frozen=True)
class LanguageModel(CudaModel):
    """A transformer of 125 million parameters, in bf16 autocast."""

    batch: int = 8
    layers: int = 14
    width: int = 768
    heads: int = 12
    length: int = 512
    vocabulary: int = 16_384

    @property
    def about(self) -> str:
        tokens = f"{self.batch} x {self.length} tokens a rank"
        return f"transformer: {self.layers} layers of width {self.width}, {tokens}, bf16 autocast"

    def module(self) -> nn.Module:
        return _LanguageModel(self.vocabulary, self.length, self.width, self.layers, self.heads)

    def data(self) -> Tensor:
        return torch.randint(self.vocabulary, (self.batch, self.length), device="cuda")

    def loss(self, module: nn.Module, data: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return functional.cross_entropy(module(data).flatten(0, 1), data.flatten())


class _Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.around: nn.Module = nn.Identity()
        if inside != outside or stride != 1:
            self.around = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolutions(x) + self.around(x))


@dataclass(frozen=True)
class ResidualNetwork(CudaModel):
    """Convolutions with batch normalisation: two hundred parameters, most of them small."""

    batch: int = 128
    blocks: tuple[tuple[int, int, int], ...] = ((64, 6, 1), (128, 8, 2), (256, 12, 2), (512, 6, 2))

    @property
    def about(self) -> str:
        count = sum(number for _, number, _ in self.blocks)
        return f"residual network: {count} blocks, {self.batch} pictures of 32 x 32 a rank, fp32"

    def module(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        inside = 64
        for outside, number, stride in self.blocks:
            for index in range(number):
                layers.append(_Residual(inside, outside, stride if index == 0 else 1))
                inside = outside
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 100))

    def data(self) -> Tensor:
        return torch.randn(self.batch, 3, 32, 32, device="cuda")

    def loss(self, module: nn.Module, data: Tensor) -> Tensor:
        loss: Tensor = module(data).square().mean()
        return loss


CUDA_MODELS: dict[str, CudaModel] = {
    "mlp": DeepMLP(),
    "transformer": LanguageModel(),
    "resnet": ResidualNetwork(),
}
