"""Random numbers that differ between ranks and repeat between runs."""

from __future__ import annotations

from murmura.errors import not_built


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python's, numpy's and torch's generators of this process from `seed` and `rank`."""
    not_built("murmura.seed_everything")
