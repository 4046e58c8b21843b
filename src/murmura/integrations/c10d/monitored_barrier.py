"""A barrier that names the ranks that did not come: rank 0 hears from all, and then tells all."""

from __future__ import annotations

import contextlib
import time

import torch

from murmura.errors import MurmuraError, PeerLost
from murmura.integrations.c10d.errors import GroupPeerLost, GroupPeerTimeout
from murmura.transports.error_reporter import Reporter
from murmura.transports.tagged_messages import Message, TaggedMessages

FIRST_TAG = 1 << 30  # above the tags of ordinary programs; each barrier has its own
PAUSE_SECONDS = 0.001
ANSWER_SECONDS = 2.0  # after the deadline, at which rank 0 tells the others who is missing


def monitored_barrier(
    messages: TaggedMessages, reporter: Reporter, number: int, seconds: float, wait_all_ranks: bool
) -> None:
    """Return once every rank has come to barrier `number`; else raise `PeerTimeout` with the names of the missing.

    Without `wait_all_ranks` the first that is missing is named, in the order of ranks. If one has died or left it is
    `PeerLost`, as soon as all others have come.
    """
    if seconds <= 0:
        raise GroupPeerTimeout(
            f"Rank {reporter.own} timed out in monitoredBarrier after {seconds:g} s. Give it a timeout above 0.",
            rank=reporter.own,
            operation="monitored_barrier",
        )
    tag = FIRST_TAG + number % (1 << 20)
    if messages.rank == 0:
        _await_all(messages, reporter, tag, seconds, wait_all_ranks)
    else:
        messages.isend(torch.zeros(1), 0, tag)
        answer = torch.zeros(1 + messages.world_size)
        began = time.monotonic()
        try:
            messages.irecv(answer, 0, tag).wait(seconds + ANSWER_SECONDS)
        except (MurmuraError, RuntimeError) as error:
            is_lost = isinstance(error, PeerLost)
            raise (GroupPeerLost if is_lost else GroupPeerTimeout)(
                f"{_reached(reporter)} ({time.monotonic() - began:.1f} s). Please check rank {reporter.world_rank(0)} "
                f"logs for faulty rank. ({error})",
                rank=reporter.own,
                peer=getattr(error, "peer", None) if is_lost else reporter.world_rank(0),
                operation="monitored_barrier",
            ) from error
        missing = [rank for rank in range(messages.world_size) if answer[1 + rank]]
        if missing:
            raise _named(reporter, missing, seconds, f"{_reached(reporter)}: ")


def _await_all(messages: TaggedMessages, reporter: Reporter, tag: int, seconds: float, wait_all_ranks: bool) -> None:
    token = torch.zeros(1)
    awaited = {peer: messages.irecv(token, peer, tag) for peer in range(1, messages.world_size)}
    until = time.monotonic() + seconds
    while any(not each.done() for each in awaited.values()) and time.monotonic() < until:
        time.sleep(PAUSE_SECONDS)
    for each in awaited.values():
        if each.source < 0 and each.done():  # its sender cannot come any more, or another one cannot
            _raise_lost(each, reporter)
    missing = [peer for peer, each in awaited.items() if each.source < 0]
    named = missing if wait_all_ranks else missing[:1]
    answer = torch.zeros(1 + messages.world_size)
    for peer in named:
        answer[1 + peer] = 1.0
    for peer in awaited:
        with contextlib.suppress(MurmuraError):  # if it is gone
            messages.isend(answer, peer, tag)
    if named:
        raise _named(reporter, named, seconds)


def _raise_lost(message: Message, reporter: Reporter) -> None:
    try:
        message.wait()
    except PeerLost as error:  # which the other ranks hear of, too
        raise GroupPeerLost(
            f"Rank {error.peer} failed to pass monitoredBarrier: {error}",
            rank=reporter.own,
            peer=error.peer,
            operation="monitored_barrier",
        ) from error


def _reached(reporter: Reporter) -> str:
    return (
        f"Rank {reporter.own} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        f"from rank {reporter.world_rank(0)}"
    )


def _named(reporter: Reporter, missing: list[int], seconds: float, before: str = "") -> GroupPeerTimeout:
    ranks = [reporter.world_rank(peer) for peer in missing]
    names = "Ranks " + ", ".join(map(str, ranks)) if len(ranks) > 1 else f"Rank {ranks[0]}"
    return GroupPeerTimeout(
        f"{before}{names} failed to pass monitoredBarrier in {1000 * seconds:.0f} ms, as rank {reporter.world_rank(0)} "
        "found. Look at what they do, or raise the timeout.",
        rank=reporter.own,
        peer=ranks[0],
        operation="monitored_barrier",
    )
