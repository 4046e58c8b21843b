"""Who hears of an optimizer's steps: one dispatcher per process, on torch's own global optimizer hooks.

torch runs these hooks for every optimizer, also for those built earlier; the dispatcher finds the models whose
parameters the optimizer holds. It is registered once and never removed: torch cannot register while another thread is
inside a hook.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Stepped(Protocol):
    """A model that wants to know."""

    def before_step(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer) -> None: ...


_lock = threading.Lock()
_listeners: dict[int, weakref.ref[Any]] = {}  # by id of a parameter that is alive as long as its listener
_registered = False


def listen(listener: Stepped, parameters: list[nn.Parameter]) -> None:
    """Tell `listener`, from now on, of steps of optimizers that hold any of `parameters`."""
    global _registered
    with _lock:
        for parameter in parameters:
            _listeners[id(parameter)] = weakref.ref(listener)
        if not _registered:
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _dispatch(optimizer, "before_step"))
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _dispatch(optimizer, "after_step"))
            _registered = True


def stop_listening(parameters: list[nn.Parameter]) -> None:
    with _lock:
        for parameter in parameters:
            _listeners.pop(id(parameter), None)


def is_listened_to(parameter: nn.Parameter) -> bool:
    """Whether a living model has claimed `parameter`."""
    listener = _listeners.get(id(parameter))
    return listener is not None and listener() is not None


def _dispatch(optimizer: Optimizer, event: str) -> None:
    told: list[Any] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            reference = _listeners.get(id(parameter))
            listener = reference() if reference is not None else None
            if listener is not None and not any(listener is each for each in told):
                told.append(listener)
    for listener in told:
        getattr(listener, event)(optimizer)
