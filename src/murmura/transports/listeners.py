"""Methods called before a collective begins, so that a rank first does what its peers wait for."""

from __future__ import annotations

import weakref
from collections.abc import Callable


class CollectiveListeners:
    """The listeners of a transport and of everything split off it; methods are held weakly."""

    def __init__(self) -> None:
        self.members: list[weakref.WeakMethod[Callable[[], None]]] = []

    def add(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, a bound method, at every `notify`; returns what removes it."""
        reference = weakref.WeakMethod(listener, self._remove)
        self.members.append(reference)
        return lambda: self._remove(reference)

    def notify(self) -> None:
        for reference in tuple(self.members):
            listener = reference()
            if listener is not None:
                listener()

    def _remove(self, reference: weakref.WeakMethod[Callable[[], None]]) -> None:
        self.members = [each for each in self.members if each is not reference]
