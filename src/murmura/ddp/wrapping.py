"""Which modules a DDP may wrap: none that another wrapper already keeps together."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from murmura.ddp import optimizer_hooks
from murmura.errors import ConfigError, UsageError


def check_module(module: Any, wrapper: type[nn.Module]) -> None:
    """Refuse what is no module, a module that is wrapped, and one with a wrapped part; close an older wrapper.

    The older wrapper of the very same module is one that nobody uses any more: a notebook cell was run again.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"module={module!r} is no torch.nn.Module. Pass the model itself: DDP(model).")
    if next(itertools.chain(module.parameters(), module.buffers()), None) is None:
        raise UsageError("this module has no parameters or buffers to keep together. Use it without DDP.")
    for part in module.modules():
        if isinstance(part, (wrapper, DistributedDataParallel)):
            whose = "murmura's DDP" if isinstance(part, wrapper) else "torch's DistributedDataParallel"
            raise UsageError(
                f"this module, or a part of it, is already wrapped by {whose}: its gradients would be exchanged twice. "
                "Wrap the bare model, once (ddp.into_inner() returns it); pass the bare model to a framework that "
                "wraps models itself."
            )
    drivers = {id(driver): driver for driver in map(optimizer_hooks.listener_of, module.parameters()) if driver}
    for driver in drivers.values():
        if driver.module is not module:
            raise UsageError(
                "this module shares parameters with one that is already wrapped by another DDP. Use that one, or take "
                "it apart first with ddp.into_inner()."
            )
        warnings.warn(
            "this module was still wrapped by an older DDP, which is closed now. Call ddp.close() or ddp.into_inner() "
            "before you wrap a module again.",
            UserWarning,
            stacklevel=4,
        )
        driver.close(settle=False)


def refuse_inside_torch_ddp() -> None:
    """Refuse a forward that torch's DistributedDataParallel has called: both would exchange the gradients."""
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise UsageError(
            "torch's DistributedDataParallel wraps a module that murmura's DDP keeps together: gradients would be "
            "exchanged twice. Use one of them; pass the bare model to a framework that wraps models itself."
        )
