"""The launcher: the ranks of this host, from start to end, again if asked to; the failure that matters is told last."""

from __future__ import annotations

import contextlib
import platform
import signal
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from murmura.launch.crew import Member, SignalException, run_crew
from murmura.launch.nodes import Nodes
from murmura.launch.plan import Attempt, LaunchPlan
from murmura.launch.verdict import Failure, judge


def launch(plan: LaunchPlan, say: Callable[[str], None]) -> int:
    """Run the plan's ranks to their end; returns the exit status: 0, or that of the failure, which `say` is told.

    Must be called in the main thread: signals to this process are passed on to the ranks. On one host nothing listens
    on any port; with several, the launcher of node 0 does.
    """
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
        with _folder(plan, attempt) as folder:
            ends = run_crew(
                members,
                folder,
                show=plan.log_dir is None,
                should_end=lambda: nodes is not None and nodes.has_failure(attempt),
            )
    except SignalException as told:
        if nodes is not None:
            nodes.tell(attempt, Failure(None, host, -told.sigval, "It ended its ranks.", 0))
        raise
    failure = judge(ends, lambda rank: host)
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


@contextlib.contextmanager
def _folder(plan: LaunchPlan, attempt: Attempt) -> Iterator[Path]:
    """Where the ranks' output goes: a folder of the user's, or one that is gone afterwards."""
    if plan.log_dir is not None:
        yield plan.log_dir if attempt.number == 0 else plan.log_dir / f"restart{attempt.number}"
        return
    with tempfile.TemporaryDirectory(prefix="murmura-run-") as folder:
        yield Path(folder)
