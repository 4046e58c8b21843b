"""Choices that make no sense are refused where they are made, with the name of the argument."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from murmura import (
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    ConfigError,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    Phased,
    PowerSGDAlgorithm,
    PushSumAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
    StreamingDiLoCoAlgorithm,
)
from murmura.algorithms import Algorithm

NAN, INFINITY = float("nan"), float("inf")
NO_COUNT = (0, -1, NAN, INFINITY, 1.0, True, None, "x")
NO_CHOICE = (None, 1, NAN, "x")

REFUSED: dict[type, dict[str, tuple[Any, ...]]] = {
    GradientAllReduceAlgorithm: {"hierarchical": NO_CHOICE, "average": NO_CHOICE, "compressor": (1, NAN, "x")},
    ByteGradAlgorithm: {"hierarchical": NO_CHOICE, "average": NO_CHOICE, "compressor": (None, 1, "x")},
    DecentralizedAlgorithm: {
        "hierarchical": NO_CHOICE,
        "peer_selection_mode": (None, -1, NAN, "x"),
        "communication_interval": NO_COUNT,
    },
    LowPrecisionDecentralizedAlgorithm: {
        "hierarchical": NO_CHOICE,
        "communication_interval": NO_COUNT,
        "compressor": (None, 1, "x"),
    },
    PushSumAlgorithm: {"topology": (None, 1, NAN, "x")},
    PowerSGDAlgorithm: {
        "rank": NO_COUNT,
        "warm_start": NO_CHOICE,
        "error_feedback": NO_CHOICE,
        "min_compression_rate": (0.5, NAN, INFINITY, True, None, "x"),
        "warmup_rounds": (-1, NAN, 1.0, True, None, "x"),
        "seed": (-1, NAN, 1.0, True, None, "x"),
    },
    QAdamAlgorithm: {
        "optimizer": (1, NAN, "x", QAdamOptimizer),
        "hierarchical": NO_CHOICE,
        "compressor": (None, 1, "x"),
    },
    AsyncModelAverageAlgorithm: {
        "sync_interval_ms": NO_COUNT,
        "sync_interval_rounds": tuple(each for each in NO_COUNT if each is not None),
        "warmup_rounds": (-1, NAN, INFINITY, 1.0, True, None, "x"),
    },
    LocalSGDAlgorithm: {"interval": NO_COUNT, "average_moments": NO_CHOICE},
    DiLoCoAlgorithm: {
        "interval": NO_COUNT,
        "outer_lr": (0, -1, NAN, INFINITY, True, None, "x"),
        "outer_momentum": (1, -1, NAN, INFINITY, True, None, "x"),
        "compressor": (1, NAN, "x"),
    },
    StreamingDiLoCoAlgorithm: {
        "interval": NO_COUNT,
        "outer_lr": (0, NAN, "x"),
        "fragments": (*NO_COUNT, 21),
        "overlap": (-1, NAN, INFINITY, 1.0, True, "x", 6),
        "alpha": (1, -0.5, NAN, INFINITY, True, None, "x"),
        "compressor": (1, NAN, "x"),
        "average_moments": NO_CHOICE,
    },
    Phased: {"first": NO_CHOICE, "until_round": NO_COUNT, "then": NO_CHOICE},
    QAdamOptimizer: {
        "lr": (-1, NAN, INFINITY, True, None, "x"),
        "eps": (0, -1, NAN, INFINITY, True, None, "x"),
        "weight_decay": (-1, NAN, INFINITY, True, None, "x"),
        "betas": (0.9, (0.9,), (0.9, 1.0), (NAN, 0.9), (None, 0.9), None, "xy"),
        "warmup_steps": NO_COUNT,
    },
}
REQUIRED: dict[type, dict[str, Any]] = {
    LocalSGDAlgorithm: {"interval": 2},
    DiLoCoAlgorithm: {"interval": 2},
    StreamingDiLoCoAlgorithm: {"interval": 20},
    Phased: {"first": ByteGradAlgorithm(), "until_round": 2, "then": ByteGradAlgorithm()},
    QAdamOptimizer: {"params": [torch.zeros(1)]},
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, choices in REFUSED.items() for name, values in choices.items() for value in values],
)
def test_a_senseless_choice_is_refused_by_its_name(kind: type[Algorithm], name: str, value: Any) -> None:
    required = REQUIRED.get(kind, {})
    kind(**required)
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}")):
        kind(**{**required, name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    options: Any = {"lr": np.float32(0.5), "eps": np.float64(1e-3), "warmup_steps": np.int64(3)}
    assert QAdamOptimizer([torch.zeros(1)], **options).defaults["warmup_steps"] == 3


def test_float16_weights_are_refused_by_qadam() -> None:
    half, single = (torch.zeros(3, dtype=dtype, requires_grad=True) for dtype in (torch.float16, torch.float32))
    with pytest.raises(ConfigError, match=r"a float16 parameter of shape \(3,\).* Keep float32 weights.*autocast"):
        QAdamOptimizer([single, half])
    optimizer = QAdamOptimizer([single])
    with pytest.raises(ConfigError, match="float16"):
        optimizer.add_param_group({"params": [half]})
    assert len(optimizer.param_groups) == 1
    QAdamOptimizer([torch.zeros(3, dtype=torch.bfloat16)])
