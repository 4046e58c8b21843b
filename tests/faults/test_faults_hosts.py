"""Faults on several hosts: whichever part of the transport notices, every rank names the same rank, and the cause."""

import re
import signal
import time

import pytest
from acts import be_interrupted, leave_before_channel, operate_until, reduce_until, wait_for_one
from expect import AT_ONCE_SECONDS, DEATH_SECONDS, PROMPT_SECONDS, SLACK_SECONDS, expect_lost, expect_mismatch
from hosts_acts import HostsWorld, lose_and_stay
from scenario import NUM_HEALTHY, Report
from traces import await_state

from murmura.transports.bounded_store import ANSWER_SECONDS
from murmura.transports.failure_log import roll_call_seconds

PAIRS, WOVEN = (0, 0, 1, 1), (0, 1, 0, 1)
TIMEOUT = 1.0  # of what must time out
NUMEL = 1024
CALL = f"all_reduce(sum) of float32[{NUMEL}]"

# Two hosts; the culprit is a rank beside its leader, or a leader, on either host.
PLACES = [
    (PAIRS, 3),
    (WOVEN, 1),
    *(pytest.param(*place, marks=pytest.mark.slow) for place in [(PAIRS, 0), (PAIRS, 1), (WOVEN, 0), (WOVEN, 2)]),
]


def others(culprit):
    return [rank for rank in range(4) if rank != culprit]


@pytest.mark.parametrize(("hosts", "culprit"), PLACES)
@pytest.mark.parametrize("moment", ["be_absent", pytest.param("go_on", marks=pytest.mark.slow)])
@pytest.mark.parametrize("payload", ["prepared", pytest.param("staged", marks=pytest.mark.slow)])
def test_ranks_of_every_host_name_a_killed_rank_within_two_seconds(hosts, culprit, payload, moment):
    with HostsWorld(hosts, reduce_until, payload, moment, culprit) as world:
        world.await_word("ready", *others(culprit))
        world.await_word("fault", culprit)
        killed = world.kill(culprit)
        for report in world.reports(*others(culprit)):
            expect_lost(report, culprit, number=NUM_HEALTHY + 1 if moment == "be_absent" else None)
            assert report.ended - killed < DEATH_SECONDS


@pytest.mark.parametrize(("hosts", "culprit"), PLACES)
def test_a_death_is_passed_on_by_ranks_that_keep_their_transport_open(hosts, culprit):
    """A leader that noticed it in memory breaks the connections on which other hosts wait for it."""
    with HostsWorld(hosts, lose_and_stay, culprit) as world:
        world.await_word("fault", culprit)
        world.kill(culprit)
        for rank in others(culprit):
            assert world.actors[rank].await_word("lost", within=PROMPT_SECONDS) == {"peer": culprit}


@pytest.mark.parametrize(("hosts", "culprit"), PLACES)
@pytest.mark.parametrize(
    ("fault", "story"),
    [
        ("raise_error", "rank {} raised ValueError: the loader broke"),
        pytest.param("return_early", "rank {} closed its transport and left", marks=pytest.mark.slow),
        pytest.param("close_and_stay", "rank {} closed its transport and left", marks=pytest.mark.slow),
        pytest.param("os_exit", "rank {} died: it was killed, or exited without closing", marks=pytest.mark.slow),
    ],
)
def test_ranks_of_every_host_name_the_rank_that_left_and_why(hosts, culprit, fault, story):
    with HostsWorld(hosts, reduce_until, "prepared", fault, culprit) as world:
        for report in world.reports(*others(culprit)):
            expect_lost(report, culprit, number=NUM_HEALTHY + 1)
            assert story.format(culprit) in report.message
            assert report.waited < PROMPT_SECONDS


@pytest.mark.parametrize(("hosts", "culprit"), PLACES)
def test_ranks_of_every_host_give_up_on_a_stopped_rank_at_their_deadline(hosts, culprit):
    with HostsWorld(hosts, reduce_until, "prepared", "be_absent", culprit, timeout=TIMEOUT) as world:
        world.await_word("ready", *others(culprit))
        world.await_word("fault", culprit)
        world.stop(culprit)
        for report in world.reports(*others(culprit)):
            expect_timeout(report, culprit)


def test_ranks_of_every_host_give_up_also_on_the_rank_that_serves_the_store():
    culprit = 0
    with HostsWorld(PAIRS, reduce_until, "prepared", "be_absent", culprit, timeout=TIMEOUT, served=True) as world:
        world.await_word("ready", *others(culprit))
        world.await_word("fault", culprit)
        world.stop(culprit)
        for report in world.reports(*others(culprit)):
            expect_timeout(report, culprit, more=ANSWER_SECONDS)


@pytest.mark.parametrize(
    "operation", ["small async all_reduce", "staged broadcast", "small ring", "all_gather", "barrier"]
)
def test_other_operations_name_the_lost_rank_too(operation):
    culprit = 3
    with HostsWorld(PAIRS, operate_until, operation, "be_absent", culprit) as world:
        world.await_word("ready", *others(culprit))
        world.await_word("fault", culprit)
        killed = world.kill(culprit)
        for report in world.reports(*others(culprit)):
            assert (report.kind, report.rank, report.peer) == ("PeerLost", report.own, culprit), report
            assert report.ended - killed < DEATH_SECONDS
            expect_poisoned(report)


def test_a_rank_that_never_came_to_the_channel_is_named():
    with HostsWorld(PAIRS, leave_before_channel, 3) as world:
        for report in world.reports(0, 1, 2):
            assert (report.kind, report.peer) == ("PeerLost", 3), report
            assert "the loader broke" in report.message


def test_a_wait_that_has_become_long_is_told_in_the_ranks_of_the_world():
    culprit = 3
    with HostsWorld(PAIRS, wait_for_one, culprit, 0.2, timeout=TIMEOUT + 1) as world:
        for report in world.reports(*others(culprit)):
            expect_timeout(report, culprit, timeout=TIMEOUT + 1)
        (report,) = world.reports(2)
        assert re.match(r"rank 2 has waited 0 s for rank 3 in ", report.warnings[0][1])


# Ranks that disagree


def test_ranks_of_a_host_that_disagree_tell_all():
    with HostsWorld(PAIRS, reduce_until, "prepared", "call_barrier", 3) as world:
        for report in world.reports():
            expect_mismatch(report, {2: CALL, 3: "barrier()"})
            assert report.waited < PROMPT_SECONDS


@pytest.mark.parametrize("hosts", [PAIRS, WOVEN])
@pytest.mark.parametrize(
    ("fault", "call"), [("call_barrier", "barrier()"), ("pass_other_op", f"all_reduce(max) of float32[{NUMEL}]")]
)
def test_ranks_that_always_compare_know_the_whole_table(hosts, fault, call):
    with HostsWorld(hosts, reduce_until, "prepared", fault, 1, check="always") as world:
        for report in world.reports():
            expect_mismatch(report, {0: CALL, 1: call, 2: CALL, 3: CALL})
            assert report.waited < PROMPT_SECONDS


def test_hosts_that_disagree_compare_notes_at_the_deadline():
    with HostsWorld((0, 1, 1), reduce_until, "prepared", "call_broadcast", 0, timeout=TIMEOUT) as world:
        for report in world.reports():
            assert report.kind == "CollectiveMismatch", report
            assert report.calls[0] == f"broadcast(src=0) of float32[{NUMEL}]"
            assert report.calls[1] == CALL
            expect_poisoned(report)


# Interrupts


@pytest.mark.parametrize("culprit", [0, 3])
@pytest.mark.parametrize("operation", ["barrier", "small ring"])
def test_an_interrupt_ends_a_wait_at_once_and_the_others_hear_of_it(operation, culprit):
    with HostsWorld(PAIRS, be_interrupted, operation, culprit) as world:
        world.await_word("ready", culprit)
        await_state(world.actors[culprit].pid, "S")
        interrupted = world.actors[culprit].signal(signal.SIGINT)
        (report,) = world.reports(culprit)
        assert time.monotonic() - interrupted < DEATH_SECONDS  # closing included
        assert report.kind == "KeyboardInterrupt"
        for rank in others(culprit):
            world.actors[rank].say("go on")
        for report in world.reports(*others(culprit)):
            assert (report.kind, report.peer) == ("PeerLost", culprit), report
            assert "KeyboardInterrupt" in report.message


def expect_timeout(report: Report, culprit: int, timeout: float = TIMEOUT, more: float = 0.0) -> None:
    """The rank waited until its deadline, then for a moment for the others to say what they know."""
    assert (report.kind, report.rank, report.peer) == ("PeerTimeout", report.own, culprit), report
    assert re.search(rf"for rank {culprit} in all_reduce #\d+\.", report.message)
    assert timeout <= report.waited < timeout + roll_call_seconds(timeout) + SLACK_SECONDS + more
    expect_poisoned(report)


def expect_poisoned(report: Report) -> None:
    assert report.later
    for again in report.later:
        assert (again.kind, again.peer) == (report.kind, report.peer), again
        assert again.seconds < AT_ONCE_SECONDS, again
