"""The hooks that DDP sits on: on the inner module, on its outputs, and on its parameters.

They hold the wrapper weakly and know their module, so that a deep copy of the module, or one whose wrapper is gone,
runs as if there were none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo


class Hooked(Protocol):
    """What the hooks call; all in the thread that runs forward or backward."""

    def before_forward(self) -> None: ...

    def output_reached(self) -> None: ...

    def gradient_came(self, parameter: nn.Parameter) -> None: ...


def hook_module(owner: Hooked, module: nn.Module) -> list[Any]:
    """Hooks around the forwards of `module`."""
    before, after = _Before(owner, module), _After(owner, module)
    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


class _ModuleHook:
    """A hook of one module and one wrapper; a copy of the module, deep or pickled, gets one that does nothing."""

    def __init__(self, owner: Hooked, module: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self._module = weakref.ref(module)

    def owner_of(self, called: nn.Module) -> Hooked | None:
        """The wrapper, if `called` is its module and records a graph."""
        return self._owner() if called is self._module() and torch.is_grad_enabled() else None

    def __reduce__(self) -> Any:
        return _inert, ()


class _Before(_ModuleHook):
    @_disable_dynamo  # in a compiled module communication stays as it is
    def __call__(self, called: nn.Module, args: Any) -> None:
        owner = self.owner_of(called)
        if owner is not None and called.training:
            owner.before_forward()


class _After(_ModuleHook):
    @_disable_dynamo
    def __call__(self, called: nn.Module, args: Any, output: Any) -> None:
        if self.owner_of(called) is None:
            return
        reference = self._owner

        def on_gradient(gradient: Tensor) -> None:
            owner = reference()
            if owner is not None:
                owner.output_reached()

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(on_gradient)  # type: ignore[no-untyped-call]


def _inert() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    """The hook of a copy."""


def hook_parameter(owner: Hooked, parameter: nn.Parameter) -> Any:
    """A hook that runs when the gradient of `parameter` has been accumulated."""
    reference = weakref.ref(owner)

    def came(parameter: Tensor) -> None:
        owner = reference()
        if owner is not None:
            assert isinstance(parameter, nn.Parameter)
            owner.gradient_came(parameter)

    return parameter.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` in the thread of the backward under way, when that has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of a module's output, however it nests them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from tensors_in(each)
    elif isinstance(output, (list, tuple)):
        for each in output:
            yield from tensors_in(each)
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from tensors_in(getattr(output, name))
