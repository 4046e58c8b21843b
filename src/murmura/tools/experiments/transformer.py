"""A small decoder-only transformer: what the experiments and benchmarks train."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Transformer(nn.Module):
    """Pre-norm blocks of causal attention and a four times wider MLP, over sequences of at most `context` symbols."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.symbols(text) + self.positions[: text.shape[1]])))
        return logits


class Block(nn.Module):
    """One layer of `Transformer`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        together: Tensor = self.queries_keys_values(self.attention_norm(x))
        queries, keys, values = together.view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, context, width))
        thought: Tensor = self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + thought


@torch.no_grad()
def initialise(module: nn.Module, seed: int) -> None:
    """Draw all weights anew from `seed` alone: ranks that are threads share torch's global generator."""
    generator = torch.Generator().manual_seed(seed)
    for each in module.modules():
        if isinstance(each, nn.Linear):
            bound = 1 / math.sqrt(each.in_features)
            each.weight.uniform_(-bound, bound, generator=generator)
            if each.bias is not None:
                each.bias.zero_()
        elif isinstance(each, nn.Embedding):
            each.weight.normal_(0.0, 1 / math.sqrt(each.embedding_dim), generator=generator)
