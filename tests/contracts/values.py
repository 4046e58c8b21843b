"""Flat tensors of every kind that a compressor may meet; deterministic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FINITE = [
    "normal",
    "outliers",
    "positive",
    "negative",
    "offset",
    "far offset",
    "constant",
    "zeros",
    "sparse",
    "tiny",
    "subnormal",
    "last subnormals",
    "whole range",
    "largest",
    "integers",
]
NON_FINITE = ["an infinity", "a nan", "both infinities"]
KINDS = [*FINITE, *NON_FINITE]


def samples(kind: str, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """`numel` values of a kind; finite ones stay so in every dtype."""
    generator = torch.Generator().manual_seed(1000 * KINDS.index(kind) + seed)
    normal = torch.randn(numel, generator=generator, dtype=torch.float64)
    uniform = torch.rand(numel, generator=generator, dtype=torch.float64)
    limits = torch.finfo(dtype)
    match kind:
        case "normal" | "an infinity" | "a nan" | "both infinities":
            values = normal
        case "outliers":
            values = torch.where(uniform < 0.001, 1e3 * normal, 1e-3 * normal)
        case "positive":
            values = uniform + 1e-3
        case "negative":
            values = -uniform - 5
        case "offset":
            values = 100 + uniform
        case "far offset":
            values = 3e4 + 1e-3 * normal
        case "constant":
            values = torch.full_like(normal, -math.pi)
        case "zeros":
            values = torch.zeros_like(normal)
        case "sparse":
            values = torch.where(uniform < 0.01, normal, 0)
        case "tiny":
            values = normal * limits.tiny * 1000
        case "subnormal":
            values = normal * limits.tiny / 10
        case "last subnormals":
            values = (normal * 40).round() * limits.smallest_normal * limits.eps
        case "whole range":
            values = (2 * uniform - 1) * limits.max
        case "largest":
            values = torch.where(uniform < 0.5, limits.max, limits.max * uniform)
        case "integers":
            values = (normal * 10).round()
        case _:
            raise AssertionError(kind)
    values = values.clamp(limits.min, limits.max).to(dtype)
    places = torch.randint(max(numel, 1), (2,), generator=generator).tolist()
    if numel and kind in NON_FINITE:
        values[places[0]] = math.nan if kind == "a nan" else math.inf
        values[places[1]] = -math.inf if kind == "both infinities" else values[places[1]]
    return values
