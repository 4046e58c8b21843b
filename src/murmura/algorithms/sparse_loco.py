"""DiLoCo whose compressor takes the place of the outer momentum (SparseLoCo, arXiv 2508.15706)."""

from __future__ import annotations

from dataclasses import replace

from murmura.algorithms.diloco import DiLoCoAlgorithm
from murmura.algorithms.names import LOCAL_STEPS, register_algorithm
from murmura.compressors import Compressor, ErrorFeedback, compressor_named
from murmura.registry import parse

DECAY = 0.95
"""The share of what waits that counts at the next exchange, as the paper has it."""


@register_algorithm("sparse_loco")
def sparse_loco(
    interval: int = LOCAL_STEPS,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    compressor: Compressor | str | None = "topk2bit",
    average_moments: bool = False,
) -> DiLoCoAlgorithm:
    """`DiLoCoAlgorithm` with the choices of SparseLoCo; a compressor named without `decay` that has feedback fades."""
    if isinstance(compressor, str) and "decay" not in parse(compressor)[1]:
        compressor = compressor_named(compressor)
        if isinstance(compressor, ErrorFeedback):
            compressor = replace(compressor, decay=DECAY)
    return DiLoCoAlgorithm(interval, outer_lr, outer_momentum, compressor=compressor, average_moments=average_moments)
