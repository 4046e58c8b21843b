"""How many bytes a rank sends for a mean over the ranks; each algorithm's `bytes_per_round` says how often it does."""

from __future__ import annotations

import torch

from murmura.compressors import Compressor


def payload_bytes(num_elements: int, compressor: Compressor | None = None) -> int:
    """The bytes of so many float32, as they are or as `compressor` makes them."""
    return 4 * num_elements if compressor is None else compressor.payload_bytes(num_elements, torch.float32)


def mean_bytes(num_elements: int, num_ranks: int, compressor: Compressor | None = None) -> float:
    """What each of n ranks sends for a mean: 2 (n - 1) / n of the payload, in a ring or by chunks all to all."""
    return 2 * (num_ranks - 1) / num_ranks * payload_bytes(num_elements, compressor)
