"""Methods called before a collective begins, so that a rank first does what its peers wait for."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator


class CollectiveListeners:
    """The listeners of a transport and of everything split off it; methods are held weakly."""

    def __init__(self) -> None:
        self.members: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._heard = threading.local()

    def add(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, a bound method, at every `notify`; returns what removes it."""
        reference = weakref.WeakMethod(listener, self._remove)
        self.members.append(reference)
        return lambda: self._remove(reference)

    def notify(self) -> None:
        if getattr(self._heard, "already", False):
            return
        for reference in tuple(self.members):
            listener = reference()
            if listener is not None:
                listener()

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Inside it this thread carries out a collective of which the listeners have heard: they do not hear again."""
        before, self._heard.already = getattr(self._heard, "already", False), True
        try:
            yield
        finally:
            self._heard.already = before

    def _remove(self, reference: weakref.WeakMethod[Callable[[], None]]) -> None:
        self.members = [each for each in self.members if each is not reference]
