"""The ranks of one host for one attempt: started, watched and logged by torch.distributed.elastic, without a port."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
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

from murmura.launch.limits import make_sure_of_descriptors, refusals_told
from murmura.launch.verdict import End

__all__ = ["Member", "SignalException", "run_crew"]

POLL_SECONDS = 0.05
LAST_WORDS_SECONDS = 4.0  # for the other ranks to notice that one has failed, and to say what that meant to them
END_SECONDS = 30  # after a signal to the launcher: for a rank to save its work, before it is killed
END_AFTER_FAILURE_SECONDS = 5  # the same after another rank's failure, when ranks can save nothing together
KILL_SECONDS = 5  # for the kernel to remove a killed process
DESCRIPTORS_PER_RANK = 6  # two files, each opened by us, to be written by the rank, and to be shown
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
    """Each rank's output in two files: of a folder, or without a name and shown on the console."""

    def __init__(self, folder: Path | None, ranks: Sequence[int], held: contextlib.ExitStack) -> None:
        super().__init__(None if folder is None else str(folder))
        self._show = folder is None
        if folder is None and not os.path.isdir("/proc/self/fd"):  # macOS: files have names, and a kill leaves them
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="murmura-run-")))

        def path(name: str) -> str:
            if folder is not None:
                return str(folder / name)
            file = held.enter_context(tempfile.TemporaryFile())  # gone with this process, even if it is killed
            return f"/proc/self/fd/{file.fileno()}"

        self.outputs = {index: path(f"rank{rank}.out") for index, rank in enumerate(ranks)}
        self.errors = {index: path(f"rank{rank}.err") for index, rank in enumerate(ranks)}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        shown = (self.outputs, self.errors) if self._show else ({}, {})
        return LogsDest(self.outputs, self.errors, *shown, dict.fromkeys(envs, ""))

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)


def run_crew(
    members: Sequence[Member], folder: Path | None, *, should_end: Callable[[], bool] = lambda: False
) -> list[End]:
    """Run the members to their end and return how they ended, in order; afterwards none of them is left.

    Their output goes to files in `folder`, or is shown. When one fails, or `should_end`, the others have
    `LAST_WORDS_SECONDS` to end by themselves. A signal to this process is passed on to them, and then raised as
    torch's `SignalException`. `should_end` is asked until all have ended.
    """
    order: list[int] = []
    with contextlib.ExitStack() as held:
        held.enter_context(_signal_handlers_restored())
        held.enter_context(_torch_is_quiet())
        with refusals_told(f"{len(members)} ranks cannot be started"):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            # All of them before the first rank is started: torch would leave those that it has started already.
            make_sure_of_descriptors(DESCRIPTORS_PER_RANK * len(members) + 4)
            files = Files(folder, [member.rank for member in members], held)
            context = _start(members, files)
        try:
            _watch(context, order, should_end)
        except SignalException as told:
            with contextlib.suppress(SignalException):  # told twice: no more patience
                _end(context, told.sigval, END_SECONDS, should_end)
            raise
        else:
            _end(context, signal.SIGTERM, END_AFTER_FAILURE_SECONDS, should_end)
        finally:
            context.close(signal.SIGKILL, KILL_SECONDS)
            sys.stdout.flush()
        ended = [index for index in range(len(members)) if index not in order]
        return [
            End(
                members[index].rank,
                # None: even SIGKILL does not end a process that waits inside a driver or for a dead file server
                context.subprocess_handlers[index].proc.returncode or 0,
                _tail(files.errors[index]),
                was_ended=index in ended,
            )
            for index in [*order, *ended]
        ]


def _end(context: SubprocessContext, number: signal.Signals, patience: float, tick: Callable[[], object]) -> None:
    """Ask all ranks to end, and wait until they have, or for `patience` seconds."""
    deadline = time.monotonic() + patience
    for handler in context.subprocess_handlers.values():
        for each in (number, signal.SIGCONT):  # a stopped rank would not hear of it
            if handler.proc.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(handler.proc.pid, each)
    while any(handler.proc.poll() is None for handler in context.subprocess_handlers.values()):
        if time.monotonic() > deadline:
            return
        tick()
        time.sleep(POLL_SECONDS)


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


@contextlib.contextmanager
def _torch_is_quiet() -> Iterator[None]:
    """What torch's own launcher warns of while ranks run, we tell."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


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
