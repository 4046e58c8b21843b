"""Follows the backwards of a model: whether each of them synchronises, and when it ends."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch

from murmura.ddp import hooks
from murmura.ddp.round import STEP_IN_BACKWARD
from murmura.errors import UsageError


class BackwardTracker:
    """Knows the backward that is running; `on_end`, a bound method held weakly, is called when it ends.

    A backward that passes an output of the root is decided by the last forward of the root, inside `no_sync` or not,
    as torch's DDP does. One that passes none is decided when it starts.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.in_no_sync = False
        self.syncs = True  # whether the backward that is running, or ran last, synchronises
        self._on_end = weakref.WeakMethod(on_end)
        self.forward_syncs = True  # what the last forward of the root decided
        self._running: Callable[[], object] = _nothing  # a weak reference to the callback of the running backward

    @property
    def is_running(self) -> bool:
        """Whether a backward of this model is running: one that raised is not, because torch drops its callback."""
        return self._running() is not None

    @property
    def recomputes(self) -> bool:
        """Whether the caller is inside any backward: activation checkpointing computes a forward again there."""
        return self.is_running or torch._C._current_graph_task_id() != -1

    def forward(self) -> None:
        """A forward of the root begins."""
        self.forward_syncs = not self.in_no_sync

    def follow(self, *, through_root: bool) -> None:
        """A backward is running, which may be new; `through_root` if it has reached an output of the root."""
        if self.is_running:
            return
        self.syncs = self.forward_syncs if through_root else not self.in_no_sync
        reference = self._on_end

        def end() -> None:
            on_end = reference()
            if on_end is not None:
                on_end()

        self._running = weakref.ref(end)
        hooks.at_end_of_backward(end)

    def refuse_step(self) -> None:
        """Raise `UsageError` in a backward that is running, even if none of its gradients has come here yet."""
        if self.is_running:
            raise UsageError(STEP_IN_BACKWARD)

    def ended(self) -> None:
        """The running backward has ended."""
        self._running = _nothing

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside it, forwards decide that their backward only accumulates."""
        before, self.in_no_sync = self.in_no_sync, True
        try:
            yield
        finally:
            self.in_no_sync = before


def _nothing() -> None:
    """Replaces a weak reference while no backward is running."""
