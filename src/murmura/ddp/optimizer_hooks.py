"""Tells models of optimizers' steps: one dispatcher per process, on torch's own global optimizer hooks.

torch runs these hooks for every optimizer, also for those built earlier; the dispatcher finds the models whose
parameters the optimizer holds. It is registered once and never removed: torch cannot register while another thread is
inside a hook.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Stepped(Protocol):
    """A model that is told of steps."""

    def before_step(self, optimizer: Optimizer) -> None: ...

    def after_closure(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer) -> None: ...


_lock = threading.Lock()
_listeners: dict[int, weakref.ref[Any]] = {}  # by id of a parameter that is alive as long as its listener
_registered = False


def listen(listener: Stepped, parameters: Sequence[nn.Parameter]) -> None:
    """Tell `listener`, from now on, of steps of optimizers that hold any of `parameters`."""
    global _registered
    with _lock:
        for parameter in parameters:
            _listeners[id(parameter)] = weakref.ref(listener)
        if not _registered:
            register_optimizer_step_pre_hook(_before_step)
            register_optimizer_step_post_hook(_after_step)
            _registered = True


def stop_listening(listener: Stepped, parameters: Sequence[nn.Parameter]) -> None:
    with _lock:
        for parameter in parameters:
            reference = _listeners.get(id(parameter))
            if reference is not None and reference() in (listener, None):
                del _listeners[id(parameter)]


def listener_of(parameter: nn.Parameter) -> Any:
    """The living model that has claimed `parameter`, or None."""
    reference = _listeners.get(id(parameter))
    return None if reference is None else reference()


def _listeners_of(optimizer: Optimizer) -> list[Any]:
    held = (_listeners.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"])
    found = {id(each): each for each in held if each is not None}  # of one listener there is one weak reference
    return [listener for each in found.values() if (listener := each()) is not None]


@_disable_dynamo  # a compiled step must not be traced into communication
def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    listeners = _listeners_of(optimizer)
    for listener in listeners:
        listener.before_step(optimizer)
    if not listeners:
        return None
    # The rounds of a closure run inside the step: what is to be done before a step follows when it returns.
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _followed(kwargs["closure"], optimizer, listeners)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _followed(args[1], optimizer, listeners), *args[2:]), kwargs
    return None


def _followed(closure: Callable[..., Any], optimizer: Optimizer, listeners: Sequence[Any]) -> Callable[..., Any]:
    @functools.wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        for listener in listeners:
            listener.after_closure(optimizer)
        return result

    return run


@_disable_dynamo
def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in _listeners_of(optimizer):
        listener.after_step(optimizer)
