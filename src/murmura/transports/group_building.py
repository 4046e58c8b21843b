"""Builds a process group of one's own, on a store where its ranks have signed in."""

from __future__ import annotations

import contextlib
from typing import Any

from murmura.errors import MurmuraError, RendezvousError
from murmura.transports.error_reporter import ExitNotice, Reporter
from murmura.transports.failure_log import FailureLog
from murmura.transports.liveness import Liveness
from murmura.transports.own_groups import group_maker
from murmura.transports.rendezvous import Roster, Store, under
from murmura.transports.watched_store import Watch, WatchedStore, nobody, poll, run_watched

DEATH_SECONDS = 1.0  # for the death of a peer to show, after a connection to it broke


def build_group(
    roster: Roster, world_size: int, kind: str, timeout: float, reporter: Reporter, watch: Watch = nobody
) -> tuple[Any, Store]:
    """A process group of one's own, and the store it needs as long; returns when all ranks have connected.

    A rank that went ahead, did its part and closed would otherwise break the connections that others still make.
    `watch` tells of ranks that cannot come any more, and of the cause, if that is elsewhere.
    """
    rank, store = roster.rank, roster.store
    liveness = Liveness(roster.pids)
    failure_log = FailureLog(store, rank, world_size, liveness, reporter)

    def look() -> Exception | None:
        error = failure_log.cause("the rendezvous")
        return watch() or error  # in this order: what a rank says elsewhere, it says before it ends

    watched = WatchedStore(under(store, "group"), timeout, nobody)  # torch's waits there are watched from outside
    with contextlib.closing(liveness), contextlib.ExitStack() as failed:
        failed.callback(watched.release)
        try:
            make = group_maker(watched, rank, world_size, kind, timeout, len(set(roster.hosts)))
            group = run_watched(make, timeout + 1.0, look)
            watched.watch = look
            watched.set(f"connected/{rank}", b"")
            if rank == 0:  # one asks for all, the others ask for one
                watched.wait([f"connected/{peer}" for peer in range(world_size)])
                watched.set("connected", b"")
            watched.wait(["connected"])
        except BaseException as error:
            explained = _explain(error, kind, reporter, look)
            failure_log.announce_exit(ExitNotice.of(explained, reporter.own))
            if explained is error:
                raise
            raise explained from error
        failed.pop_all()
        watched.watch = watch  # what is waited for later is the transport's business
    return group, watched


def _explain(error: BaseException, kind: str, reporter: Reporter, look: Watch) -> BaseException:
    """What to raise for `error` of torch's; errors of ours, and interrupts, are themselves."""
    if isinstance(error, MurmuraError) or not isinstance(error, RuntimeError | TimeoutError):
        return error
    try:
        poll(lambda: False, DEATH_SECONDS, look)
    except MurmuraError as cause:  # it showed by then
        return cause
    return RendezvousError(
        f"rank {reporter.own} could not connect to all others over {kind}: {error} Did one of them fail "
        "meanwhile? `murmura doctor` looks at the network."
    )
