"""The hooks that DDP sits on: on the inner module and its parts, on its outputs, and on its parameters.

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

    needs_settling: bool
    """Whether the forward of a part has something to settle: checked at every forward, so it is a plain attribute."""

    def before_forward(self, training: bool) -> None: ...

    def before_part(self) -> None: ...

    def output_reached(self) -> None: ...

    def gradient_came(self, parameter: nn.Parameter, *, is_final: bool) -> None: ...

    def before_save(self) -> None: ...

    def before_load(self, module: nn.Module) -> None: ...

    def after_load(self, module: nn.Module) -> None: ...


def hook_module(owner: Hooked, module: nn.Module) -> list[Any]:
    """Hooks around the forwards of `module` and its parts, around the loading of its state, and before it is read."""
    parts = [part for part in module.modules() if part is not module]
    return [
        module.register_forward_pre_hook(_Before(owner, module)),
        module.register_forward_hook(_After(owner, module)),
        module.register_state_dict_pre_hook(_BeforeSave(owner, module)),  # type: ignore[no-untyped-call]
        *(each.register_load_state_dict_pre_hook(_BeforeLoad(owner, each)) for each in module.modules()),  # type: ignore[no-untyped-call]
        *(each.register_load_state_dict_post_hook(_AfterLoad(owner, each)) for each in module.modules()),  # type: ignore[no-untyped-call]
        *(part.register_forward_pre_hook(_BeforePart(owner, part)) for part in parts),
    ]


class _ModuleHook:
    """A hook of one module and one wrapper; a copy of the module, deep or pickled, gets one that does nothing."""

    def __init__(self, owner: Hooked, module: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self._module = weakref.ref(module)

    def owner_of(self, called: nn.Module) -> Hooked | None:
        """The wrapper, if `called` is its module and records a graph that a backward can run through."""
        if called is not self._module() or not torch.is_grad_enabled() or _in_function_transform():
            return None
        return self._owner()

    def __reduce__(self) -> Any:
        return _inert, ()


class _Before(_ModuleHook):
    @_disable_dynamo  # in a compiled module communication stays as it is
    def __call__(self, called: nn.Module, args: Any) -> None:
        owner = self.owner_of(called)
        if owner is not None:
            owner.before_forward(called.training)


class _BeforePart(_ModuleHook):
    def __call__(self, called: nn.Module, args: Any) -> None:
        owner = self._owner()
        # Within a call of the root, which has settled, a compiled graph goes on here; else it breaks here.
        if owner is not None and owner.needs_settling and torch.is_grad_enabled():
            self._settle(owner, called)

    @_disable_dynamo
    def _settle(self, owner: Hooked, called: nn.Module) -> None:
        if self.owner_of(called) is not None:
            owner.before_part()


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


class _BeforeSave(_ModuleHook):
    def __call__(self, called: nn.Module, prefix: str, keep_vars: bool) -> None:
        owner = self._owner()
        if owner is not None and called is self._module():
            owner.before_save()


class _BeforeLoad(_ModuleHook):
    def __call__(self, called: nn.Module, *args: Any) -> None:
        owner = self._owner()
        if owner is not None and called is self._module():
            owner.before_load(called)


class _AfterLoad(_ModuleHook):
    def __call__(self, called: nn.Module, incompatible_keys: Any) -> None:
        owner = self._owner()
        if owner is not None and called is self._module():
            owner.after_load(called)


def _inert() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    """The hook of a copy."""


def _in_function_transform() -> bool:
    """Whether torch.func runs: it returns gradients instead of leaving them in parameters, so there is no round."""
    return torch._C._functorch.maybe_current_level() is not None


def hook_parameter(owner: Hooked, parameter: nn.Parameter) -> Any:
    """A hook that runs when the gradient of `parameter` has been accumulated, and other hooks have changed it.

    Hooks that were added later run behind it once, and the gradient is not final. From the next backward on they run
    before it, as they do before that of torch's DDP.
    """
    reference = weakref.ref(owner)

    def came(parameter: nn.Parameter) -> None:
        owner = reference()
        if owner is None:
            return
        hooks, own = parameter._post_accumulate_grad_hooks, handle.id
        is_final = len(hooks) == 1 or next(reversed(hooks)) == own
        if not is_final and own in hooks:
            hooks[own] = hooks.pop(own)  # torch calls the hooks of a backward from a list: it does not mind
        owner.gradient_came(parameter, is_final=is_final)

    handle = with_gradient(parameter, lambda: parameter.register_post_accumulate_grad_hook(came))  # type: ignore[no-untyped-call]
    return handle


def with_gradient(parameter: nn.Parameter, register: Callable[[], Any]) -> Any:
    """What `register` returns, a hook that torch takes for trainable parameters only and keeps for frozen ones."""
    was_trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return register()
    finally:
        parameter.requires_grad_(was_trainable)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` in the thread of the running backward, when that has finished."""
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
