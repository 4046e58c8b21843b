"""The supervisor starts the ranks of one host, watches them and stops them; their output goes to files or the console.

It uses the process handling of torch.distributed.elastic, without its agent, so that no port is needed.
"""

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

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext, start_processes

from murmura.launch.limits import explain_os_errors, require_descriptors
from murmura.launch.root_cause import RankExit
from murmura.launch.signals import POLL_SECONDS, signal_handlers_restored, signals_passed_on, stop_ranks

__all__ = ["RankCommand", "supervise"]

GRACE_SECONDS = 4.0  # after a failure: for the other ranks to notice it and to report their own errors
STOP_AFTER_FAILURE_SECONDS = 5  # for a rank to end when another has failed, so that none can save a checkpoint
KILL_SECONDS = 5  # for the kernel to remove a killed process
DESCRIPTORS_PER_RANK = 6  # two files, each opened three times: here, by the rank, and to show it
TAIL_BYTES = 2**16  # of a rank's standard error, for the report of a failure

# Replaces itself by the command in its arguments, which gets SIGTERM if this launcher dies (prctl, PR_SET_PDEATHSIG).
EXEC_SCRIPT = """
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
class RankCommand:
    """The command of one rank, and its environment variables besides those of this process."""

    rank: int
    command: Sequence[str]
    variables: Mapping[str, str]


class RankLogs(LogsSpecs):
    """Two files for each rank's output: in `folder`, or without a name and copied to the console."""

    def __init__(self, folder: Path | None, ranks: Sequence[int], stack: contextlib.ExitStack) -> None:
        super().__init__(None if folder is None else str(folder))
        self._show = folder is None
        if folder is None and not os.path.isdir("/proc/self/fd"):  # macOS: files have names, and a kill leaves them
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="murmura-run-")))

        def path(name: str) -> str:
            if folder is not None:
                return str(folder / name)
            file = stack.enter_context(
                tempfile.TemporaryFile()
            )  # the kernel removes it with this process, even a killed one
            return f"/proc/self/fd/{file.fileno()}"

        self.outputs = {index: path(f"rank{rank}.out") for index, rank in enumerate(ranks)}
        self.errors = {index: path(f"rank{rank}.err") for index, rank in enumerate(ranks)}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        shown = (self.outputs, self.errors) if self._show else ({}, {})
        return LogsDest(self.outputs, self.errors, *shown, dict.fromkeys(envs, ""))

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)


def supervise(
    commands: Sequence[RankCommand], folder: Path | None, *, should_stop: Callable[[], bool] = lambda: False
) -> list[RankExit]:
    """Run the ranks until all have ended, and return how they ended, in the order of time; no process is left.

    Their output goes to files in `folder`, or to the console. When one fails, or `should_stop()` is true, the others
    have `GRACE_SECONDS` to end by themselves and are then stopped. `should_stop` is called regularly until all have
    ended. What a signal to this process does, `launch/signals.py` says.
    """
    order: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(signal_handlers_restored())
        stack.enter_context(_torch_logger_silenced())
        with explain_os_errors(f"{len(commands)} ranks cannot be started"):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            # Checked before the first rank is started: if a later start fails, torch leaves the earlier ranks running.
            require_descriptors(DESCRIPTORS_PER_RANK * len(commands) + 4)
            files = RankLogs(folder, [each.rank for each in commands], stack)
            context = _start(commands, files)
        try:
            with signals_passed_on(context, should_stop):
                _watch(context, order, should_stop)
            stop_ranks(context, signal.SIGTERM, STOP_AFTER_FAILURE_SECONDS, should_stop)
        finally:
            context.close(signal.SIGKILL, KILL_SECONDS)
            for handler in context.subprocess_handlers.values():  # torch leaves open the files of a rank that has ended
                for file in (handler._stdout, handler._stderr):
                    if file is not None:
                        file.close()
            sys.stdout.flush()
        stopped = [index for index in range(len(commands)) if index not in order]
        return [
            RankExit(
                commands[index].rank,
                # None: even SIGKILL does not end a process blocked inside a driver or on a dead file server
                context.subprocess_handlers[index].proc.returncode or 0,
                _tail(files.errors[index]),
                was_stopped=index in stopped,
            )
            for index in [*order, *stopped]
        ]


def _start(commands: Sequence[RankCommand], files: RankLogs) -> SubprocessContext:
    context = start_processes(
        "rank",
        sys.executable,
        {index: ("-I", "-c", EXEC_SCRIPT, str(os.getpid()), *each.command) for index, each in enumerate(commands)},
        {index: dict(each.variables) for index, each in enumerate(commands)},
        files,
        {index: f"[rank {each.rank}] " for index, each in enumerate(commands)},
    )
    assert isinstance(context, SubprocessContext)
    return context


@contextlib.contextmanager
def _torch_logger_silenced() -> Iterator[None]:
    """Silence torch's launcher: its warnings repeat what is reported here."""
    logger = logging.getLogger("torch.distributed.elastic")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _watch(context: SubprocessContext, order: list[int], should_stop: Callable[[], bool]) -> None:
    """Append ranks to `order` as they end; return when all have, or `GRACE_SECONDS` after a failure."""
    deadline: float | None = None
    while True:
        for index, handler in context.subprocess_handlers.items():
            if index not in order and handler.proc.poll() is not None:
                order.append(index)
                if handler.proc.returncode and deadline is None:
                    deadline = time.monotonic() + GRACE_SECONDS
        if len(order) == context.nprocs:
            return
        if deadline is None and should_stop():
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)


def _tail(path: str) -> str:
    with open(path, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        return file.read().decode(errors="replace")
