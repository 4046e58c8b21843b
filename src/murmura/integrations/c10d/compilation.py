"""Keeps torch.compile out of the backend, which C++ calls in the middle of compiled programs.

`torch.compiler.disable` would do, but imports the compiler, which takes a second.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

C = TypeVar("C", bound=type)


def outside(*names: str) -> Callable[[C], C]:
    """Let the methods called `names` of a class run as they stand, also when a compiled program calls them."""

    def decorate(kind: C) -> C:
        for name in names:
            setattr(kind, name, _disabled(getattr(kind, name)))
        return kind

    return decorate


def _disabled(method: Callable[..., Any]) -> Callable[..., Any]:
    set_eval_frame: Any = eval_frame.set_eval_frame

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        compiler = set_eval_frame(None)
        if compiler is None:
            return method(*args, **options)
        try:
            return method(*args, **options)
        finally:
            set_eval_frame(compiler)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip(call)
    return call


def skip(function: Any) -> None:
    """Let the compiler pass over the frames of `function`, though not of those it calls."""
    module: Any = eval_frame
    if hasattr(module, "set_code_exec_strategy"):
        action: Any = module._FrameAction
        module.set_code_exec_strategy(function.__code__, module._FrameExecStrategy(action.SKIP, action.DEFAULT))
    elif hasattr(module, "skip_code"):
        module.skip_code(function.__code__)
