"""The launcher behind `murmura run`: runs the ranks of this host, restarts them, and reports the root cause."""

from __future__ import annotations

import platform
import signal
import socket
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from murmura.checkpoint.files import make_folder
from murmura.launch.limits import advice_for
from murmura.launch.multi_host import LauncherGroup
from murmura.launch.plan import Attempt, LaunchPlan
from murmura.launch.root_cause import CRASH_PRIORITY, STOPPED_PRIORITY, Failure, find_failure
from murmura.launch.signals import SignalException
from murmura.launch.supervisor import RankCommand, supervise


def launch(plan: LaunchPlan, say: Callable[[str], None]) -> int:
    """Run the plan's ranks and return the exit status: 0, or that of the failure, which is passed to `say`.

    It must be called in the main thread, for signals to this process are passed on to the ranks. On one host nothing
    listens on any port; with several, the launcher of node 0 does.
    """
    if plan.log_dir is not None:  # before waiting for other hosts
        make_folder(plan.log_dir, "the ranks' output cannot be written to --log-dir")
    try:
        group = LauncherGroup(plan) if plan.num_nodes > 1 else None
        failure = None
        for number in range(plan.max_restarts + 1):
            attempt = group.rendezvous(number) if group else _on_one_host(plan, number)
            failure = _run(plan, attempt, group)
            if failure is None:
                return 0
            if failure.rank is None:
                break
            if number < plan.max_restarts:
                say(f"{failure}\nStarting all ranks again: restart {number + 1} of {plan.max_restarts}.")
        assert failure is not None
        say(str(failure))
        return failure.exit_status
    except SignalException as received:
        say(f"ended by {received.sigval.name}, which was passed on to the ranks.")
        return 128 + received.sigval
    except KeyboardInterrupt:  # before there were any ranks
        return 128 + signal.SIGINT


def _run(plan: LaunchPlan, attempt: Attempt, group: LauncherGroup | None) -> Failure | None:
    host = platform.node()
    commands = [
        RankCommand(attempt.first_rank + local_rank, plan.command, attempt.variables(plan, local_rank))
        for local_rank in range(plan.num_ranks)
    ]
    try:
        exits = supervise(
            commands, _log_folder(plan, attempt), should_stop=lambda: group is not None and group.has_failure(attempt)
        )
    except SignalException as received:
        if group is not None:
            group.report(attempt, Failure(None, host, -received.sigval, "It stopped its ranks.", CRASH_PRIORITY))
        raise
    failure = find_failure(exits, lambda rank: host)
    if failure is not None and (advice := advice_for(failure.message)):
        failure = replace(failure, message=f"{failure.message}\n{advice}")
    if group is None:
        return failure
    if failure is None and any(each.was_stopped for each in exits):  # for another host, whose launcher may be dead
        message = "It stopped its ranks because another host had failed or was lost."
        failure = Failure(None, host, 1, message, STOPPED_PRIORITY)
    return group.await_root_cause(attempt, failure)


def _on_one_host(plan: LaunchPlan, number: int) -> Attempt:
    with socket.socket() as probe:  # nothing listens there unless a script asks torch for a process group of its own
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    return Attempt(
        job=uuid.uuid4().hex, number=number, first_rank=0, world_size=plan.num_ranks, master=("127.0.0.1", port)
    )


def _log_folder(plan: LaunchPlan, attempt: Attempt) -> Path | None:
    if plan.log_dir is None or attempt.number == 0:
        return plan.log_dir
    return plan.log_dir / f"restart{attempt.number}"
