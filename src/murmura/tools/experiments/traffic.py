"""Compute how many bytes a rank sends: from an `Observer`'s counts, and by a formula for each algorithm.

n is the number of ranks, P the number of parameters, of four bytes each. A ring's all-reduce of b bytes sends
2 (n - 1) / n b from every rank; an all-to-all (n - 1) / n b, for a rank keeps its own chunk.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from murmura.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    QAdamAlgorithm,
)
from murmura.compressors import MinMaxUInt8
from murmura.errors import UsageError
from murmura.types import PeerSelection

ELEMENT_BYTES = 4


def wire_bytes(operations: Mapping[str, int], num_ranks: int) -> float:
    """Return the bytes that a rank sends for those passed to each operation, if collectives are rings."""
    n = num_ranks
    if n == 1:
        return 0.0
    factors = {
        "all_reduce": 2 * (n - 1) / n,
        "reduce_scatter": (n - 1) / n,
        "all_to_all": (n - 1) / n,
        "scatter": (n - 1) / n,
        "all_gather": n - 1.0,
    }
    return sum(factors.get(name, 1.0) * given for name, given in operations.items())


def bytes_per_step(algorithm: Algorithm, num_parameters: int, num_ranks: int) -> float:
    """Return the mean bytes that a rank sends per step by the algorithm's formula; for QAdam after its warm-up."""
    n, whole = num_ranks, ELEMENT_BYTES * num_parameters
    if n == 1:
        return 0.0
    eight_bits = MinMaxUInt8().payload_bytes(num_parameters, torch.float32)
    ring = 2 * (n - 1) / n
    match algorithm:
        case GradientAllReduceAlgorithm():
            return ring * whole
        case ByteGradAlgorithm() | QAdamAlgorithm():
            return ring * eight_bits
        case DecentralizedAlgorithm(peer_selection_mode=PeerSelection.ALL, communication_interval=interval):
            return ring * whole / interval
        case DecentralizedAlgorithm(communication_interval=interval):
            return whole * (n - n % 2) / n / interval  # with an odd number one rank has no peer
        case LowPrecisionDecentralizedAlgorithm(communication_interval=interval):
            return min(2, n - 1) * eight_bits / interval
        case AsyncModelAverageAlgorithm(sync_interval_rounds=int(interval)):
            return ring * whole / interval
        case LocalSGDAlgorithm(interval=interval) | DiLoCoAlgorithm(interval=interval):
            return ring * whole / interval
    raise UsageError(f"no formula says what {algorithm} sends: by the clock, or in phases, it depends on the run.")
