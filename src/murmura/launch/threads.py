"""`run_world` with threads: ranks are threads of this process."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from murmura.errors import MurmuraError, PeerLost, TransportError
from murmura.launch.outcomes import Outcome, as_raised, collect, failed, unfinished
from murmura.launch.root_cause import root_cause
from murmura.transports.error_reporter import ExitNotice
from murmura.transports.in_process import InProcessTransport

GRACE_SECONDS = 10.0  # after a failure: for the other ranks to notice it and to report their own errors


def run_threads(
    fn: Callable[..., Any], world_size: int, args: Sequence[Any], hosts: Sequence[int] | None, timeout: float
) -> list[Any]:
    """Run `fn` on ranks that are threads; see `run_world`.

    A thread cannot be killed: one that never communicates again outlives the call.
    """
    transports = InProcessTransport.create_group(world_size, hosts=hosts, timeout=timeout)
    ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    receive = functools.partial(_receive, ended)

    def run_rank(rank: int) -> None:
        transport = transports[rank]
        # Ranks must not share autograd's thread for a GPU: one that waits there would block the others.
        torch.autograd.set_multithreading_enabled(False)
        try:
            with transport:
                result = fn(transport, *args)
        except BaseException as error:  # raised again by run_world
            ended.put(Outcome(rank, error=error))
        else:
            ended.put(Outcome(rank, result))

    threads = [
        threading.Thread(target=run_rank, args=(rank,), name=f"murmura-rank{rank}", daemon=True)
        for rank in range(world_size)
    ]
    outcomes: list[Outcome] = []
    try:
        for thread in threads:
            thread.start()
        collect(receive, outcomes, world_size, timeout)
    except BaseException as error:  # Ctrl-C, most likely: stop the ranks, then raise it
        reason = f"the world was ended by {type(error).__name__}."
        _cancel(transports, lambda rank: TransportError(reason, rank=rank))
        deadline = time.monotonic() + GRACE_SECONDS
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        raise
    failure = root_cause(failed(outcomes))
    if failure is not None:
        assert failure.error is not None
        culprit, notice = failure.rank, ExitNotice.of(failure.error, failure.rank)
        # A rank that was lost may be about to raise the cause: a thread beside its training has failed.
        spared = culprit, failure.error.peer if isinstance(failure.error, PeerLost) else None
        _cancel(transports, lambda rank: None if rank in spared else notice.as_error(rank, culprit, ""))
        collect(receive, outcomes, world_size, min(timeout, GRACE_SECONDS), all_of_them=True)
        ended_ranks = {outcome.rank for outcome in outcomes}
        _cancel(transports, lambda rank: None if rank in ended_ranks else notice.as_error(rank, culprit, ""))
        failure = root_cause(failed(outcomes))
        assert failure is not None
        raise as_raised(failure, world_size)
    missing = sorted(set(range(world_size)) - {outcome.rank for outcome in outcomes})
    if missing:
        others = f"the other ranks ended {timeout:.1f} s ago"
        _cancel(transports, lambda rank: TransportError(f"rank {rank} was ended: {others}.", rank=rank))
        raise unfinished(missing, timeout, "a thread cannot be killed, so it goes on until it communicates")
    for thread in threads:
        thread.join()
    return [outcome.result for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)]


def _receive(ended: queue.SimpleQueue[Outcome], seconds: float) -> list[Outcome]:
    try:
        return [ended.get(timeout=seconds)]
    except queue.Empty:
        return []


def _cancel(transports: Sequence[InProcessTransport], error_for: Callable[[int], MurmuraError | None]) -> None:
    """Abort every rank's transport with `error_for(rank)`, unless that is None."""
    for transport in transports:
        if (error := error_for(transport.rank)) is not None:
            transport.abort(error)
