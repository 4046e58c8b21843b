"""The launcher: the ranks of this host, from start to end, again if asked to; the failure that matters is told last."""

from __future__ import annotations

import platform
import signal
import socket
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from murmura.errors import ConfigError
from murmura.launch.crew import Member, SignalException, run_crew
from murmura.launch.limits import advice_on
from murmura.launch.nodes import Nodes
from murmura.launch.plan import Attempt, LaunchPlan
from murmura.launch.verdict import Failure, judge


def launch(plan: LaunchPlan, say: Callable[[str], None]) -> int:
    """Run the plan's ranks to their end; returns the exit status: 0, or that of the failure, which `say` is told.

    Must be called in the main thread: signals to this process are passed on to the ranks. On one host nothing listens
    on any port; with several, the launcher of node 0 does.
    """
    _make_log_dir(plan)
    try:
        nodes = Nodes(plan) if plan.num_nodes > 1 else None
        failure = None
        for number in range(plan.max_restarts + 1):
            attempt = nodes.agree(number) if nodes else _on_one_host(plan, number)
            failure = _run(plan, attempt, nodes)
            if failure is None:
                return 0
            if failure.rank is None:
                break
            if number < plan.max_restarts:
                say(f"{failure}\nStarting all ranks again: restart {number + 1} of {plan.max_restarts}.")
        assert failure is not None
        say(str(failure))
        return failure.exit_status
    except SignalException as told:
        say(f"ended by {told.sigval.name}, which was passed on to the ranks.")
        return 128 + told.sigval
    except KeyboardInterrupt:  # before there were any ranks
        return 128 + signal.SIGINT


def _run(plan: LaunchPlan, attempt: Attempt, nodes: Nodes | None) -> Failure | None:
    host = platform.node()
    members = [
        Member(attempt.first_rank + local_rank, plan.command, attempt.variables(plan, local_rank))
        for local_rank in range(plan.num_ranks)
    ]
    try:
        ends = run_crew(
            members,
            _log_folder(plan, attempt),
            should_end=lambda: nodes is not None and nodes.has_failure(attempt),
        )
    except SignalException as told:
        if nodes is not None:
            nodes.tell(attempt, Failure(None, host, -told.sigval, "It ended its ranks.", 0))
        raise
    failure = judge(ends, lambda rank: host)
    if failure is not None and (advice := advice_on(failure.words)):
        failure = replace(failure, words=f"{failure.words}\n{advice}")
    if nodes is None:
        return failure
    if failure is None and any(end.was_ended for end in ends):  # because of another host, whose launcher may be gone
        failure = Failure(None, host, 1, "It ended its ranks because another host had failed or gone.", 5)
    return nodes.settle(attempt, failure)


def _on_one_host(plan: LaunchPlan, number: int) -> Attempt:
    with socket.socket() as probe:  # nothing listens there unless a script asks torch for a process group of its own
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    return Attempt(
        job=uuid.uuid4().hex,
        number=number,
        first_rank=0,
        world_size=plan.num_ranks,
        master=("127.0.0.1", port),
    )


def _log_folder(plan: LaunchPlan, attempt: Attempt) -> Path | None:
    if plan.log_dir is None or attempt.number == 0:
        return plan.log_dir
    return plan.log_dir / f"restart{attempt.number}"


def _make_log_dir(plan: LaunchPlan) -> None:
    """Before anybody is waited for: a folder that cannot be written is a `ConfigError`."""
    if plan.log_dir is None:
        return
    try:
        plan.log_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=plan.log_dir):
            pass
    except OSError as error:
        raise ConfigError(
            f"the ranks' output cannot be written to --log-dir {plan.log_dir}: {error.strerror}. Give a folder that "
            "this process may write to, or one that is not there yet."
        ) from error
