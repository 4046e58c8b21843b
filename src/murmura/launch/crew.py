"""The ranks of one host for one attempt: started, watched and logged by torch.distributed.elastic, without a port."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import (
    LogsDest,
    LogsSpecs,
    SignalException,
    SubprocessContext,
    start_processes,
)

from murmura.launch.verdict import End

__all__ = ["Member", "SignalException", "run_crew"]

POLL_SECONDS = 0.05
LAST_WORDS_SECONDS = 4.0  # for the other ranks to notice that one has failed, and to say what that meant to them
END_SECONDS = 30  # for a rank that was asked to end, to save its work, before it is killed
READ_BYTES = 2**16  # of what a rank wrote last

# Becomes the program named by its arguments, which gets SIGTERM if this launcher is killed (prctl, PR_SET_PDEATHSIG).
TIE = """
import ctypes, os, sys
launcher, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15)
    if os.getppid() != int(launcher):
        sys.exit("the launcher died")
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"{command[0]} cannot be started: {error}")
"""


@dataclass(frozen=True)
class Member:
    """A rank to start: the words of its command, and its variables besides those of this process."""

    rank: int
    command: Sequence[str]
    variables: Mapping[str, str]


class Files(LogsSpecs):
    """Each rank's output in two files of a folder; shown on the console too, or not."""

    def __init__(self, folder: Path, ranks: Sequence[int], *, show: bool) -> None:
        super().__init__(str(folder))
        self.outputs = {index: str(folder / f"rank{rank}.out") for index, rank in enumerate(ranks)}
        self.errors = {index: str(folder / f"rank{rank}.err") for index, rank in enumerate(ranks)}
        self._show = show

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        shown = (self.outputs, self.errors) if self._show else ({}, {})
        return LogsDest(self.outputs, self.errors, *shown, dict.fromkeys(envs, ""))

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)


def run_crew(
    members: Sequence[Member], folder: Path, *, show: bool, should_end: Callable[[], bool] = lambda: False
) -> list[End]:
    """Run the members to their end and return how they ended, in order; afterwards none of them is left.

    When one fails, or `should_end`, the others have `LAST_WORDS_SECONDS` to end by themselves. A signal to this
    process is passed on to them, and then raised as torch's `SignalException`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = Files(folder, [member.rank for member in members], show=show)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it warns of, we tell
    order: list[int] = []
    with _signal_handlers_restored():
        context = _start(members, files)
        try:
            _watch(context, order, should_end)
        except SignalException as told:
            try:
                context.close(told.sigval, END_SECONDS)
            except SignalException:  # told twice: no more patience
                context.close(signal.SIGKILL, END_SECONDS)
            raise
        finally:
            context.close(signal.SIGTERM, END_SECONDS)
            sys.stdout.flush()
    ended = [index for index in range(len(members)) if index not in order]
    return [
        End(
            members[index].rank,
            context.subprocess_handlers[index].proc.returncode,
            _tail(files.errors[index]),
            was_ended=index in ended,
        )
        for index in [*order, *ended]
    ]


def _start(members: Sequence[Member], files: Files) -> SubprocessContext:
    context = start_processes(
        "rank",
        sys.executable,
        {index: ("-I", "-c", TIE, str(os.getpid()), *member.command) for index, member in enumerate(members)},
        {index: dict(member.variables) for index, member in enumerate(members)},
        files,
        {index: f"[rank {member.rank}] " for index, member in enumerate(members)},
    )
    assert isinstance(context, SubprocessContext)
    return context


@contextlib.contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Torch sets its own when it starts processes, and leaves them."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(context: SubprocessContext, order: list[int], should_end: Callable[[], bool]) -> None:
    """Note in `order` who ended by itself; returns when all have, or some time after a failure."""
    deadline: float | None = None
    while True:
        for index, handler in context.subprocess_handlers.items():
            if index not in order and handler.proc.poll() is not None:
                order.append(index)
                if handler.proc.returncode and deadline is None:
                    deadline = time.monotonic() + LAST_WORDS_SECONDS
        if len(order) == context.nprocs:
            return
        if deadline is None and should_end():
            deadline = time.monotonic() + LAST_WORDS_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)


def _tail(path: str) -> str:
    with open(path, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - READ_BYTES))
        return file.read().decode(errors="replace")
