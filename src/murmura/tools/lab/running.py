"""One command on every host of a lab, as the ranks of one world: they get the variables of a launcher."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from murmura.errors import ConfigError, PeerLost, PeerTimeout
from murmura.launch.crew import Member, SignalException, run_crew
from murmura.launch.verdict import fate, judge
from murmura.tools.lab.network import Host

PORT = 29500  # free: nothing else runs in the namespaces
POLL_SECONDS = 0.02
LAST_WORDS_SECONDS = 10.0  # for the other ranks to end by themselves once one has failed
SHOWN_CHARACTERS = 4000


def places(hosts: Sequence[Host], ranks_per_host: int) -> Iterator[tuple[Host, dict[str, str]]]:
    """For each rank its host and its variables, those that torchrun would set; ranks of one host are consecutive."""
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
    words: Sequence[str],
    *,
    ranks_per_host: int = 1,
    env: Mapping[str, str] | None = None,
    capture: bool = False,
    timeout: float = 600.0,
) -> list[str]:
    """See `Hosts.run`."""
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as files:

        def target() -> IO[str] | None:
            return files.enter_context(tempfile.TemporaryFile("w+", errors="replace")) if capture else None

        out_and_err: list[tuple[IO[str] | None, IO[str] | None]] = []
        try:
            for host, variables in places(hosts, ranks_per_host):
                line = host.command(words, **variables | dict(env or {}))
                out, err = target(), target()
                processes.append(subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=out, stderr=err))
                out_and_err.append((out, err))
            failed = _await(processes, timeout)
        finally:
            _end(processes)
        if failed is not None:
            told = _contents(out_and_err[failed][1])[-SHOWN_CHARACTERS:].rstrip()
            shown = f":\n{told}" if told else "; its output says why."
            ended = fate(processes[failed].returncode)
            raise PeerLost(f"rank {failed} on host {failed // ranks_per_host} {ended}{shown}", peer=failed)
        return [_contents(out) for out, _ in out_and_err]


def run_shown(hosts: Sequence[Host], words: Sequence[str], ranks_per_host: int, say: Callable[[str], None]) -> int:
    """The same for a console: what ranks print carries their rank, the failure that matters is told last.

    Returns the exit status. Must be called in the main thread, for signals are passed on to the ranks.
    """
    members = [
        Member(rank, host.command(words, **variables), {"PYTHONUNBUFFERED": "1"})
        for rank, (host, variables) in enumerate(places(hosts, ranks_per_host))
    ]
    try:
        ends = run_crew(members, None)
    except SignalException as told:
        say(f"ended by {told.sigval.name}, which was passed on to the ranks.")
        return 128 + told.sigval
    failure = judge(ends, lambda rank: f"host {rank // ranks_per_host}")
    if failure is None:
        return 0
    say(str(failure))
    return failure.exit_status


def _await(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> int | None:
    """Wait until all have ended; returns the first that failed, when the others have had time for last words."""
    deadline = time.monotonic() + timeout
    failed: int | None = None
    while running := [rank for rank, process in enumerate(processes) if process.poll() is None]:
        if failed is None:
            failed = _first_failed(processes)
            if failed is not None:
                deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
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


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for end, patience in (("terminate", 2.0), ("kill", 5.0)):
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            getattr(process, end)()
        deadline = time.monotonic() + patience
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def _contents(file: IO[str] | None) -> str:
    if file is None:
        return ""
    file.seek(0)
    return file.read()
