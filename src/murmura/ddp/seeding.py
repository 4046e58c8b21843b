"""Random numbers that differ between ranks and repeat between runs."""

from __future__ import annotations

import random

import numpy as np
import torch

from murmura.errors import UsageError


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python's, numpy's and torch's generators of this process from `seed` and `rank`.

    Streams of different ranks are independent. Ranks that are threads share these generators: give each its own
    torch.Generator instead.
    """
    for name, value in (("seed", seed), ("rank", rank)):
        if not isinstance(value, int | np.integer) or value < 0:
            raise UsageError(f"{name}={value!r} must be a whole number, at least 0.")
    derived = int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint32)[0])
    random.seed(derived)
    np.random.seed(derived)
    torch.manual_seed(derived)
