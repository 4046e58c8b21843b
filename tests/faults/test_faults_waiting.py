"""How ranks wait: asleep, woken every time, with a word to the log when it takes long; and Ctrl-C ends it."""

import logging
import signal
import time

import pytest
from acts import be_interrupted, be_interrupted_at_random, be_interrupted_beside_a_thread, wait_for_one
from expect import AT_ONCE_SECONDS, DEATH_SECONDS, expect_timeout
from scenario import NUM_HEALTHY, Actor, World
from skew import mix_with_skew, reduce_with_skew, wait_on_a_busy_machine, wait_while_one_computes
from traces import await_state

from murmura.errors import PeerTimeout
from murmura.transports import stalls
from murmura.transports.error_reporter import Reporter

# A machine on which others work too


@pytest.mark.parametrize("numel", [1, 2**20], ids=["small", "large"])
def test_a_rank_that_yields_to_others_keeps_its_deadline(numel):
    with World("processes", 2, wait_on_a_busy_machine, numel) as world:
        (report,) = world.reports(0)
        assert (report.kind, report.peer) == ("PeerTimeout", 1)
        assert report.waited < 5.0


# The log


def test_a_warning_comes_after_ten_seconds_and_then_ever_less_often(monkeypatch, caplog):
    assert stalls.WARN_SECONDS == 10.0
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = stalls.WaitDeadline(Reporter(2, range(8)), "all_reduce #7", 600.0)
    warned = []
    with caplog.at_level(logging.WARNING, "murmura"):
        while now < 1599.0:
            now += 1.0
            deadline.check([0, 3])
            if len(caplog.records) > len(warned):
                warned.append(now - 1000.0)
        assert warned == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0]
        now += 1.0
        with pytest.raises(PeerTimeout, match=r"rank 2 waited 600\.0 s for ranks 0 and 3 in all_reduce #7"):
            deadline.check([0, 3])
    assert caplog.records[0].getMessage() == (
        "rank 2 has waited 10 s for ranks 0 and 3 in all_reduce #7; it gives up after 600 s."
    )


def test_a_wait_that_has_its_deadline_elsewhere_names_none(monkeypatch, caplog):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    deadline = stalls.WaitDeadline(Reporter(2, range(8)), "all_reduce #7")
    now += 10.0
    with caplog.at_level(logging.WARNING, "murmura"):
        deadline.check([0])
    assert caplog.messages == ["rank 2 has waited 10 s for rank 0 in all_reduce #7."]


def test_processes_that_stall_say_for_whom_they_wait():
    timeout = 2.0
    with World("processes", 3, wait_for_one, 1, 0.2, timeout=timeout) as world:
        for report in world.reports(0, 2):
            expect_timeout(report, 1, timeout, number=NUM_HEALTHY + 1)
            # After 0.2, 0.4, 0.8 and 1.6 s; the last may come too late to be said.
            assert 3 <= len(report.warnings) <= 4, report.warnings
            for _, message in report.warnings:
                assert message.startswith(f"rank {report.own} has waited")
                assert f"for rank 1 in all_reduce #{NUM_HEALTHY + 1}; it gives up after 2 s" in message
            assert report.warnings[0][0] - report.called >= 0.2
            assert report.warnings[2][0] - report.called >= 0.8


def test_threads_that_stall_say_for_whom_they_wait(monkeypatch):
    monkeypatch.setattr(stalls, "WARN_SECONDS", 0.4)
    timeout = 2.5
    with World("threads", 3, wait_for_one, 1, None, timeout=timeout) as world:
        for report in world.reports(0, 2):
            expect_timeout(report, 1, timeout, number=NUM_HEALTHY + 1)
            assert 1 <= len(report.warnings) <= 3, report.warnings  # after 0.4, 0.8 and 1.6 s, or at the next look
            for _, message in report.warnings:
                assert f"for rank 1 in all_reduce #{NUM_HEALTHY + 1}; it gives up after 2 s" in message
            assert report.warnings[0][0] - report.called >= 0.4


# Ctrl-C


@pytest.mark.parametrize(
    "operation",
    ["barrier", "small broadcast from rank 1", "staged broadcast", "large ring", "recvs", "small async all_reduce"],
)
def test_an_interrupt_ends_a_wait_at_once_and_the_others_hear_of_it(operation):
    culprit = 0
    with World("processes", 3, be_interrupted, operation, culprit) as world:
        world.await_word("ready", culprit)
        await_state(world.actors[culprit].pid, "S")  # it sleeps in the operation: there is nothing else to sleep in
        interrupted = world.actors[culprit].signal(signal.SIGINT)
        (report,) = world.reports(culprit)
        assert report.kind == "KeyboardInterrupt"
        assert report.ended - interrupted < DEATH_SECONDS
        for again in report.later:
            assert again.kind == "TransportError", again
            assert again.seconds < AT_ONCE_SECONDS
        for rank in (1, 2):
            world.actors[rank].say("go on")
        for report in world.reports(1, 2):
            assert (report.kind, report.peer) == ("PeerLost", culprit), report
            assert "KeyboardInterrupt" in report.message


def test_an_interrupt_ends_the_wait_of_a_thread_at_once_and_the_others_hear_of_it():
    actor = Actor("rank 0 and rank 1", be_interrupted_beside_a_thread)
    try:
        actor.await_word("ready")
        await_state(actor.pid, "S")
        interrupted = actor.signal(signal.SIGINT)
        (message,) = actor.await_word("lost")["messages"]
        report = actor.report()
    finally:
        actor.end()
    assert report.kind == "KeyboardInterrupt"
    assert report.ended - interrupted < DEATH_SECONDS
    assert "rank 1 lost rank 0 in barrier" in message
    assert "KeyboardInterrupt" in message


def test_an_interrupt_may_come_at_any_moment():
    with World("processes", 2, be_interrupted_at_random, 300) as world:
        interrupted, other = world.reports()
        assert interrupted.result == {"KeyboardInterrupt": 300}, interrupted
        assert other.kind == "", other


# Processor time


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ("threads", "barrier"),
        ("processes", "small async all_reduce"),
        ("processes", "staged broadcast"),
        ("processes", "recvs"),
    ],
)
def test_ranks_that_wait_leave_the_processors_to_the_one_that_computes(kind, operation):
    with World(kind, 4, wait_while_one_computes, operation, 2.0) as world:
        for report in world.reports(1, 2, 3):
            used, wall = report.result
            assert wall > 1.5, "it did not wait"
            assert used < 0.25 * wall


# Wake-ups and the order of memory


@pytest.mark.parametrize(
    ("world_size", "num_operations", "patient"),
    [(2, 10_000, True), (2, 2_000, False), (4, 2_000, True), (4, 1_000, False)],
)
def test_many_small_all_reduces_with_skew_are_exact_and_no_wake_up_is_lost(world_size, num_operations, patient):
    _skew(world_size, num_operations, patient)


@pytest.mark.parametrize(("world_size", "num_rounds"), [(2, 600), (3, 400), (4, 300)])
def test_a_mixture_of_all_operations_with_skew_is_exact(world_size, num_rounds):
    _mix(world_size, num_rounds)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "num_rounds"), [(2, 6000), (3, 4000), (4, 3000), (5, 2000)])
def test_a_mixture_ten_times_as_long(world_size, num_rounds):
    _mix(world_size, num_rounds)


def _mix(world_size, num_rounds):
    with World("processes", world_size, mix_with_skew, num_rounds, timeout=60.0) as world:
        for actor in world.actors.values():
            report = actor.report(within=500.0)
            assert report.kind == "", report


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "num_operations", "patient"),
    [(2, 200_000, True), (2, 50_000, False), (3, 50_000, True), (4, 50_000, True), (4, 20_000, False)],
)
def test_ten_times_as_many(world_size, num_operations, patient):
    _skew(world_size, num_operations, patient)


def _skew(world_size, num_operations, patient):
    with World("processes", world_size, reduce_with_skew, num_operations, patient, timeout=60.0) as world:
        for actor in world.actors.values():
            report = actor.report(within=500.0)
            assert report.kind == "", report
