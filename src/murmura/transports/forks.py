"""A rank is one process: a child forked from it inherits its transports, and must neither use nor end them.

Objects that reach the world's memory or connections are registered here, by weak references. In a forked child their
`after_fork` is called before the child does anything else, so that operations need not check for a fork themselves.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from typing import Any, Protocol

from murmura.errors import TransportError


class Inherited(Protocol):
    """What a forked child inherits."""

    def after_fork(self) -> None:
        """This process was forked: hold no lock that another thread held, and touch nothing that is shared."""


def forked_from(rank: int) -> TransportError:
    """The error of every operation in a child that was forked from `rank`."""
    return TransportError(
        f"this process was forked from rank {rank} and is no rank itself: what it sent would be taken for what rank "
        f"{rank} sends. Communicate in the process of rank {rank}, or start this one by spawn or forkserver and let it "
        "join a world of its own.",
        rank=rank,
    )


_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def guard(thing: Inherited) -> None:
    """Call `thing.after_fork` in every child that is forked while `thing` lives."""
    _register()
    _inherited.add(thing)


@functools.cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for thing in list(_inherited):
        with contextlib.suppress(AttributeError):  # of one that another thread was just making
            thing.after_fork()
