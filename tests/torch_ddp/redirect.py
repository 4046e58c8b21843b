"""Redirects to the CPU what torch's own tests of DistributedDataParallel do on GPUs, and lifts their demand for GPUs.

Nothing here knows murmura: the same redirection serves torch's class and ours. It is for a process that runs nothing
else, and must be called before torch's test module is imported, because its decorators skip at import.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal import common_distributed

NUM_GPUS = 8  # that the tests believe in

FACTORIES = ("empty", "full", "ones", "rand", "randn", "tensor", "zeros")


def lift_skips() -> None:
    """Let tests run that ask for GPUs."""

    def unchanged(test: Any) -> Any:
        return test

    common_distributed.skip_if_no_gpu = unchanged
    for name in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu"):
        setattr(common_distributed, name, lambda *args, **kwargs: unchanged)


def redirect_devices() -> None:
    """Let every tensor and module that is sent to a GPU stay on the CPU."""
    cpu = torch.device("cpu")
    Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    Tensor.to = _on_cpu(Tensor.to)  # type: ignore[method-assign]
    nn.Module.to = _on_cpu(nn.Module.to)  # type: ignore[method-assign]
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.cuda.device_count = lambda: NUM_GPUS
    torch.cuda.current_device = lambda: cpu
    torch.cuda.set_device = torch.cuda.synchronize = torch.cuda.manual_seed = lambda *args, **kwargs: None
    torch.cuda.Stream = lambda *args, **kwargs: None  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,misc]


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with every device among its arguments replaced by the CPU."""

    def redirected(value: Any) -> Any:
        is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
        return torch.device("cpu") if is_device else value

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        first, *rest = args
        rest = [redirected(each) for each in rest]
        if function.__name__ == "to" and rest and isinstance(rest[0], int):  # the index of a GPU
            rest[0] = torch.device("cpu")
        return function(first, *rest, **kwargs)

    return call
