"""Watchdog: a thread that looks after operations on a GPU, for which no host waits."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import weakref
from typing import Protocol

import torch

log = logging.getLogger("murmura")

LOOK_SECONDS = 0.1  # between two looks
IDLE_LOOKS = 50  # without a launch between them, after which the thread sleeps until something is launched
END_SECONDS = 10.0  # for the look under way to end, when the last channel is closed

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Channel(Protocol):
    """The launches of a channel."""

    def look(self) -> bool:
        """Forget what is done, and end what takes too long. Whether anything is pending."""
        ...


class Watchdog:
    """Looks after the launches of a transport and of what was split off it, in a thread that lives as long as they.

    While a program trains the thread does not sleep between two rounds: to be woken it would take the GIL from the
    thread that launches the first bucket, which costs a step most of a millisecond.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._awake = threading.Event()  # set while the thread looks, and by what is launched while it sleeps
        self._num_idle_looks = 0  # in a row
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._changing = threading.RLock()  # held while `_thread` or `_channels` are changed, or these are listed
        self._has_complained = False  # since it last could look

    def watch(self, channel: Channel) -> None:
        with self._changing:
            self._channels.add(channel)

    def forget(self, channel: Channel) -> None:
        """`channel` launches nothing any more; the last one ends the thread."""
        with self._changing:
            self._channels.discard(channel)
            is_last = not self._channels
        if is_last:
            self._ended.set()
            self._awake.set()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(END_SECONDS)  # it may be asking ranks that do not answer
            self._thread = None

    def wake(self) -> None:
        """Something has been launched."""
        if not self._is_alive():
            with self._changing:
                if not self._is_alive():
                    self._ended = threading.Event()  # one before may not have ended yet
                    args = (weakref.ref(self), self._device, self._awake, self._ended)
                    self._thread = threading.Thread(target=_look_after, args=args, name="murmura-watchdog", daemon=True)
                    self._thread.start()
        self._num_idle_looks = 0
        if not self._awake.is_set():
            self._awake.set()

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def look(self) -> None:
        if self._num_idle_looks >= IDLE_LOOKS:
            self._awake.clear()  # before it looks: what is launched from now on wakes it
        self._num_idle_looks += 1
        error: Exception | None = None
        with self._changing:
            channels = list(self._channels)
        for channel in channels:
            try:
                is_pending = channel.look()
            except Exception as failed:  # an error of the GPU, for example; without this thread no deadline holds
                is_pending, error = True, failed
            if is_pending:
                self._num_idle_looks = 0
                self._awake.set()
        if error is not None and not self._has_complained:
            log.warning(
                "the deadlines of operations on the GPU cannot be checked now, and will be again soon: %s", error
            )
        self._has_complained = error is not None


def _look_after(
    reference: weakref.ref[Watchdog], device: torch.device, awake: threading.Event, ended: threading.Event
) -> None:
    """The thread: holds the watchdog only while it looks, so that a transport that is dropped takes it along."""
    torch.cuda.set_device(device)  # a thread begins on GPU 0, where its first query would make a context
    _ignore_captures()
    while not ended.wait(LOOK_SECONDS):
        if not awake.wait(1.0):
            if reference() is None:
                return
            continue
        watchdog = reference()
        if watchdog is None:
            return
        watchdog.look()
        del watchdog


def _ignore_captures() -> None:
    """Let queries of this thread break no CUDA graph that another thread captures; torch's own watchdog does the same.

    By default the driver ends a capture when any thread queries an event.
    """
    with contextlib.suppress(OSError, AttributeError):  # no driver of NVIDIA's
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
