"""How many bytes a rank sends for a mean over the ranks; each algorithm's `bytes_per_round` says how often it does."""

from __future__ import annotations

import torch

from murmura.algorithms.base import Parameters
from murmura.compressors import Compressor, compressor_named


def num_elements(parameters: Parameters) -> int:
    """The number of elements of all `parameters`."""
    return parameters if isinstance(parameters, int) else sum(torch.Size(shape).numel() for shape in parameters)


def payload_bytes(parameters: Parameters, compressor: Compressor | str | None = None) -> int:
    """The bytes of so many float32, as they are or as `compressor` makes them."""
    numel = num_elements(parameters)
    if isinstance(compressor, str):
        compressor = compressor_named(compressor)
    return 4 * numel if compressor is None else compressor.payload_bytes(numel, torch.float32)


def mean_bytes(parameters: Parameters, num_ranks: int, compressor: Compressor | str | None = None) -> float:
    """What each of n ranks sends for a mean: 2 (n - 1) / n of the payload, in a ring or by chunks all to all.

    It is n - 1 times the payload if `compressor` gathers.
    """
    if isinstance(compressor, str):
        compressor = compressor_named(compressor)
    share = num_ranks - 1 if compressor is not None and compressor.gathers else 2 * (num_ranks - 1) / num_ranks
    return share * payload_bytes(parameters, compressor)
