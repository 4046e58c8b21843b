"""Algorithms by name, for the command line, the environment and short scripts."""

from __future__ import annotations

from collections.abc import Callable

from murmura.algorithms.async_model_average import AsyncModelAverageAlgorithm
from murmura.algorithms.base import Algorithm
from murmura.algorithms.bytegrad import ByteGradAlgorithm
from murmura.algorithms.decentralized import DecentralizedAlgorithm
from murmura.algorithms.diloco import DiLoCoAlgorithm
from murmura.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from murmura.algorithms.local_sgd import LocalSGDAlgorithm
from murmura.algorithms.low_precision_decentralized import LowPrecisionDecentralizedAlgorithm
from murmura.algorithms.qadam import QAdamAlgorithm
from murmura.errors import ConfigError
from murmura.types import PeerSelection

LOCAL_STEPS = 20
"""The interval of `local_sgd`, `diloco` and `async` when they are asked for by name."""

_BY_NAME: dict[str, Callable[[], Algorithm]] = {
    "gradient_allreduce": GradientAllReduceAlgorithm,
    "bytegrad": ByteGradAlgorithm,
    "decentralized": DecentralizedAlgorithm,
    "shift_one": lambda: DecentralizedAlgorithm(peer_selection_mode=PeerSelection.SHIFT_ONE),
    "low_precision_decentralized": LowPrecisionDecentralizedAlgorithm,
    "qadam": QAdamAlgorithm,
    "async": lambda: AsyncModelAverageAlgorithm(sync_interval_rounds=LOCAL_STEPS),
    "local_sgd": lambda: LocalSGDAlgorithm(LOCAL_STEPS),
    "diloco": lambda: DiLoCoAlgorithm(LOCAL_STEPS),
}


def algorithm_names() -> list[str]:
    """The names that `algorithm_named` knows, the plain one first."""
    return list(_BY_NAME)


def algorithm_named(name: str) -> Algorithm:
    """The algorithm of that name, with its default choices."""
    if name not in _BY_NAME:
        raise ConfigError(f"algorithm={name!r} is unknown. Known: {', '.join(map(repr, sorted(_BY_NAME)))}.")
    return _BY_NAME[name]()
