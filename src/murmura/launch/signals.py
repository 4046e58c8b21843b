"""What Ctrl-C, SIGTERM and other signals to `murmura run` do.

The first signal is passed on to all ranks, which have `STOP_SECONDS` to save their work; a second one kills them at
once. The exit status is then 128 plus the signal's number, as a shell's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext

__all__ = ["SignalException", "signal_handlers_restored", "signals_passed_on", "stop_ranks"]

POLL_SECONDS = 0.05
STOP_SECONDS = 30  # after a signal to the launcher: for a rank to save its work before it is killed


@contextlib.contextmanager
def signals_passed_on(context: SubprocessContext, tick: Callable[[], object]) -> Iterator[None]:
    """Pass a signal to this process on to the ranks of `context`, and raise it as torch's `SignalException`."""
    try:
        yield
    except SignalException as received:
        with contextlib.suppress(SignalException):  # a second signal: kill at once
            stop_ranks(context, received.sigval, STOP_SECONDS, tick)
        raise


def stop_ranks(context: SubprocessContext, number: signal.Signals, seconds: float, tick: Callable[[], object]) -> None:
    """Send the signal to all ranks and wait until they have ended, `seconds` at most; `tick` is called meanwhile."""
    deadline = time.monotonic() + seconds
    for handler in context.subprocess_handlers.values():
        for each in (number, signal.SIGCONT):  # a suspended rank handles no signal
            if handler.proc.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, each)
    while any(handler.proc.poll() is None for handler in context.subprocess_handlers.values()):
        if time.monotonic() > deadline:
            return
        tick()
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def signal_handlers_restored() -> Iterator[None]:
    """Restore the handlers that torch replaces, and does not restore, when it starts processes."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
