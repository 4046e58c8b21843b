"""Run one command on every host of a lab as the ranks of one world, with torchrun's environment variables."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from murmura.errors import ConfigError, PeerLost, PeerTimeout
from murmura.launch.root_cause import describe_status, find_failure
from murmura.launch.signals import SignalException
from murmura.launch.supervisor import RankCommand, supervise
from murmura.tools.lab.network import Host

PORT = 29500  # free: nothing else runs in the namespaces
POLL_SECONDS = 0.02
GRACE_SECONDS = 10.0  # for the other ranks to end by themselves once one has failed
SHOWN_CHARACTERS = 4000


def rank_environments(hosts: Sequence[Host], ranks_per_host: int) -> Iterator[tuple[Host, dict[str, str]]]:
    """Yield each rank's host and the variables that torchrun would set; ranks of one host are consecutive."""
    if ranks_per_host < 1:
        raise ConfigError(f"ranks_per_host={ranks_per_host}: give at least one.")
    for rank in range(len(hosts) * ranks_per_host):
        index, local_rank = divmod(rank, ranks_per_host)
        yield (
            hosts[index],
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts) * ranks_per_host),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(PORT),
            },
        )


def run(
    hosts: Sequence[Host],
    command: Sequence[str],
    *,
    ranks_per_host: int = 1,
    env: Mapping[str, str] | None = None,
    capture: bool = False,
    timeout: float = 600.0,
) -> list[str]:
    """Run `command` on every rank; see `Hosts.run`."""
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as files:

        def target() -> IO[str] | None:
            return files.enter_context(tempfile.TemporaryFile("w+", errors="replace")) if capture else None

        out_and_err: list[tuple[IO[str] | None, IO[str] | None]] = []
        try:
            for host, variables in rank_environments(hosts, ranks_per_host):
                line = host.command(command, **variables | dict(env or {}))
                out, err = target(), target()
                processes.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=err))
                out_and_err.append((out, err))
            failed = _await(processes, timeout)
        finally:
            _stop(processes)
        if failed is not None:
            errors = _contents(out_and_err[failed][1])[-SHOWN_CHARACTERS:].rstrip()
            shown = f":\n{errors}" if errors else "; its output says why."
            ended = describe_status(processes[failed].returncode)
            raise PeerLost(f"rank {failed} on host {failed // ranks_per_host} {ended}{shown}", peer=failed)
        return [_contents(out) for out, _ in out_and_err]


def run_shown(hosts: Sequence[Host], command: Sequence[str], ranks_per_host: int, say: Callable[[str], None]) -> int:
    """Run `command` on every rank, show its output with the rank in front, and pass the root cause to `say`.

    Returns the exit status. It must be called in the main thread, for signals are passed on to the ranks.
    """
    commands = [
        RankCommand(rank, host.command(command, **variables), {"PYTHONUNBUFFERED": "1"})
        for rank, (host, variables) in enumerate(rank_environments(hosts, ranks_per_host))
    ]
    try:
        exits = supervise(commands, None)
    except SignalException as received:
        say(f"ended by {received.sigval.name}, which was passed on to the ranks.")
        return 128 + received.sigval
    failure = find_failure(exits, lambda rank: f"host {rank // ranks_per_host}")
    if failure is None:
        return 0
    say(str(failure))
    return failure.exit_status


def _await(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> int | None:
    """Wait until all have ended, or `GRACE_SECONDS` after a failure; return the first that failed."""
    deadline = time.monotonic() + timeout
    failed: int | None = None
    while running := [rank for rank, process in enumerate(processes) if process.poll() is None]:
        if failed is None:
            failed = _first_failed(processes)
            if failed is not None:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > deadline:
            if failed is not None:
                return failed
            raise PeerTimeout(
                f"rank{'s' if len(running) > 1 else ''} {', '.join(map(str, running))} of the lab had not ended after "
                f"{timeout:.1f} s and were ended. If there was still work to do there, raise the timeout of Hosts.run.",
                peer=running[0],
            )
        time.sleep(POLL_SECONDS)
    return _first_failed(processes) if failed is None else failed


def _first_failed(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    return next((rank for rank, process in enumerate(processes) if process.poll()), None)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for method, seconds in (("terminate", 2.0), ("kill", 5.0)):
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            getattr(process, method)()
        deadline = time.monotonic() + seconds
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def _contents(file: IO[str] | None) -> str:
    if file is None:
        return ""
    file.seek(0)
    return file.read()
