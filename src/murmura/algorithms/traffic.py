"""How many bytes a rank sends for a mean over the ranks; each algorithm's `bytes_per_round` says how often it does."""

from __future__ import annotations

import torch

from murmura.algorithms.base import Parameters
from murmura.algorithms.checks import as_compressor, at_least, at_least_one
from murmura.compressors import Compressor
from murmura.errors import ConfigError


def num_elements(parameters: Parameters) -> int:
    """The number of elements of all `parameters`."""
    if isinstance(parameters, int):
        at_least(0, parameters=parameters)
        return parameters
    try:
        shapes = [torch.Size(shape) for shape in parameters]
    except TypeError:
        shapes = [torch.Size([-1])]
    if any(length < 0 for shape in shapes for length in shape):
        raise ConfigError(f"parameters={parameters!r}: give shapes, or the number of elements.")
    return sum(shape.numel() for shape in shapes)


def payload_bytes(parameters: Parameters, compressor: Compressor | str | None = None) -> int:
    """The bytes of so many float32, as they are or as `compressor` makes them."""
    numel = num_elements(parameters)
    return 4 * numel if compressor is None else as_compressor(compressor).payload_bytes(numel, torch.float32)


def mean_bytes(parameters: Parameters, num_ranks: int, compressor: Compressor | str | None = None) -> float:
    """What each of n ranks sends for a mean: 2 (n - 1) / n of the payload, in a ring or by chunks all to all.

    It is n - 1 times the payload if `compressor` gathers.
    """
    at_least_one(num_ranks=num_ranks)
    gathers = compressor is not None and as_compressor(compressor).gathers
    share = num_ranks - 1 if gathers else 2 * (num_ranks - 1) / num_ranks
    return share * payload_bytes(parameters, compressor)
