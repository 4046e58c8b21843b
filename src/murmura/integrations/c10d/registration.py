"""Tells torch.distributed of the backend "murmura", without importing what it consists of."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def register() -> None:
    """Make "murmura" a backend of torch.distributed for CPU tensors; may be called again."""
    if dist.is_available() and "murmura" not in dist.Backend.backend_list:
        dist.Backend.register_backend("murmura", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any = None) -> Any:
    from murmura.integrations.c10d.creation import create

    return create(options, backend_options)
