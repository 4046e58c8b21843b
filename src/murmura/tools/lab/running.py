"""Run one command on every host of a lab as the ranks of one world, with torchrun's environment variables."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from murmura.errors import ConfigError, PeerLost, PeerTimeout, name_ranks
from murmura.launch.root_cause import find_failure
from murmura.launch.signals import SignalException
from murmura.launch.supervisor import RankCommand, supervise
from murmura.tools.lab.network import Host

PORT = 29500  # free: nothing else runs in the namespaces


def rank_commands(
    hosts: Sequence[Host], command: Sequence[str], ranks_per_host: int, env: Mapping[str, str]
) -> list[RankCommand]:
    """Return the command of each rank, with the variables that torchrun would set; ranks of a host are consecutive."""
    if ranks_per_host < 1:
        raise ConfigError(f"ranks_per_host={ranks_per_host}: give at least one.")
    commands = []
    for rank in range(len(hosts) * ranks_per_host):
        index, local_rank = divmod(rank, ranks_per_host)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts) * ranks_per_host),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(PORT),
        }
        line = hosts[index].command(command, **variables | dict(env))
        commands.append(RankCommand(rank, line, {"PYTHONUNBUFFERED": "1"}))
    return commands


def run(
    hosts: Sequence[Host],
    command: Sequence[str],
    ranks_per_host: int,
    env: Mapping[str, str],
    capture: bool,
    timeout: float,
) -> list[str]:
    """Run `command` on every rank; see `Hosts.run`."""
    commands = rank_commands(hosts, command, ranks_per_host, env)
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="murmura-lab-") as name:
        folder = Path(name) if capture else None
        try:
            exits = supervise(commands, folder, should_stop=lambda: time.monotonic() > deadline)
        except SignalException as received:
            if received.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise
        failure = find_failure(exits, lambda rank: f"host {rank // ranks_per_host}")
        if failure is not None:
            raise PeerLost(str(failure), peer=failure.rank)
        if unfinished := sorted(each.rank for each in exits if each.was_stopped):
            raise PeerTimeout(
                f"{name_ranks(unfinished)} of the lab had not ended "
                f"after {timeout:.1f} s and were ended. If there was still work to do there, raise the timeout of "
                "Hosts.run.",
                peer=unfinished[0],
            )
        return [(folder / f"rank{each.rank}.out").read_text(errors="replace") if folder else "" for each in commands]


def run_shown(hosts: Sequence[Host], command: Sequence[str], ranks_per_host: int, say: Callable[[str], None]) -> int:
    """Run `command` on every rank, show its output with the rank in front, and pass the root cause to `say`.

    Returns the exit status. It must be called in the main thread, for signals are passed on to the ranks.
    """
    try:
        exits = supervise(rank_commands(hosts, command, ranks_per_host, {}), None)
    except SignalException as received:
        say(f"ended by {received.sigval.name}, which was passed on to the ranks.")
        return 128 + received.sigval
    failure = find_failure(exits, lambda rank: f"host {rank // ranks_per_host}")
    if failure is None:
        return 0
    say(str(failure))
    return failure.exit_status
