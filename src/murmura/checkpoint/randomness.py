"""The state of a process's global random number generators: torch's, numpy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of all generators as tensors and plain values."""
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(key).astype(np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if has_cuda else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned.

    GPUs that were not in use then, or do not exist now, keep their state.
    """
    random.setstate(state["python"])
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, key.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(each, device)
