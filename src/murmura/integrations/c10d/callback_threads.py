"""Threads for the callbacks of futures: as many as there are callbacks at a time.

A callback may itself call a collective and wait for it, so it can run neither on the thread that serves a group nor
behind another callback.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

IDLE_SECONDS = 0.2  # after which a thread without work ends


class CallbackThreads:
    """Runs each callback at once, on a thread that is idle or on a new one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = 0
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()

    def run(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
                self._jobs.put(callback)
                return
        threading.Thread(target=self._serve, args=(callback,), name="murmura-c10d-callback", daemon=True).start()

    def _serve(self, callback: Callable[[], None]) -> None:
        while True:
            callback()
            del callback  # which may keep tensors alive
            with self._lock:
                self._idle += 1
            try:
                callback = self._jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._idle -= 1
                        return
                callback = self._jobs.get()


callback_threads = CallbackThreads()
