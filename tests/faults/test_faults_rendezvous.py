"""Faults before a world exists: ranks that never come, die on the way, contradict each other, or are not ours."""

import contextlib
import os
import signal
import socket
import time
import uuid

import pytest
from acts import reduce_until
from expect import DEATH_SECONDS, PROMPT_SECONDS, SLACK_SECONDS, expect_lost
from scenario import Actor, World, join_and_play
from strangers import NOBODY, knock_as_another_user, live_in_many_worlds, squat_as_another_user
from traces import assert_nothing_left

from murmura.transports.shared_memory.rendezvous import socket_address

TIMEOUT = 1.0

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def _expect_refusal(report):
    assert report.kind == "RendezvousError", report
    assert not report.ports


def _expect_deadline(report, timeout=TIMEOUT):
    _expect_refusal(report)
    assert timeout - 0.1 <= report.waited < timeout + SLACK_SECONDS


def _await_joined(host, guest):
    """Return once the process `host` holds a pidfd of `guest`: that is, has let it in."""
    give_up = time.monotonic() + 20.0
    while True:
        for name in os.listdir(f"/proc/{host.pid}/fdinfo"):
            try:
                with open(f"/proc/{host.pid}/fdinfo/{name}") as info:
                    if f"Pid:\t{guest.pid}\n" in info.readlines():
                        return
            except OSError:  # closed meanwhile
                continue
        assert time.monotonic() < give_up, f"{guest.name} was not let in"
        os.sched_yield()


# Ranks that do not come


def test_rank_zero_names_all_that_did_not_come():
    with World("processes", 3, reduce_until, "prepared", "go_on", 0, timeout=TIMEOUT, only=[0]) as world:
        (report,) = world.reports(0)
        _expect_deadline(report)
        assert report.missing == (1, 2)
        assert "ranks 1, 2 did not come" in report.message
        assert "Were they started" in report.message


def test_the_others_name_rank_zero_if_it_did_not_come():
    with World("processes", 3, reduce_until, "prepared", "go_on", 0, timeout=TIMEOUT, only=[1, 2]) as world:
        for report in world.reports(1, 2):
            _expect_deadline(report)
            assert report.missing == (0,)
            assert "rank 0, which did not come. Was it started" in report.message


def test_every_rank_that_came_names_the_one_that_did_not():
    with World("processes", 3, reduce_until, "prepared", "go_on", 0, timeout=TIMEOUT, only=[0, 1]) as world:
        for report in world.reports(0, 1):
            _expect_deadline(report)
            assert report.missing == (2,), report


# Ranks that die on the way


def test_the_others_hear_at_once_that_rank_zero_died_while_they_waited():
    with World("processes", 3, reduce_until, "prepared", "go_on", 0, only=[0, 1]) as world:
        _await_joined(world.actors[0], world.actors[1])
        killed = world.kill(0)
        (report,) = world.reports(1)
        _expect_refusal(report)
        assert report.missing == (0,)
        assert "lost rank 0" in report.message
        assert report.ended - killed < DEATH_SECONDS


def test_a_rank_that_died_after_it_was_let_in_is_lost_in_the_first_operation():
    with World("processes", 3, reduce_until, "prepared", "go_on", 0, only=[0, 1]) as world:
        _await_joined(world.actors[0], world.actors[1])
        world.kill(1)
        world.start(2)
        for report in world.reports(0, 2):
            assert (report.kind, report.peer, report.operation) == ("PeerLost", 1, "all_reduce #1"), report
            assert report.waited < DEATH_SECONDS


def test_a_rank_that_died_on_the_way_is_among_the_missing():
    with World("processes", 3, reduce_until, "prepared", "go_on", 0, timeout=TIMEOUT, only=[0, 1]) as world:
        _await_joined(world.actors[0], world.actors[1])
        world.kill(1)
        (report,) = world.reports(0)
        _expect_refusal(report)
        assert report.missing == (1, 2), report


@pytest.mark.slow
def test_a_crowd_at_the_door_of_a_stopped_rank_zero_does_not_hold_up_the_others_for_ever():
    with World("processes", 2, reduce_until, "prepared", "go_on", 0, timeout=TIMEOUT, only=[0]) as world:
        address = socket_address(world.job)
        with contextlib.ExitStack() as crowd:
            while not _knock(crowd, address):  # until rank 0 has come
                os.sched_yield()
            world.stop(0)
            while _knock(crowd, address):
                pass
            _expect_refusal(world.start(1).report(within=TIMEOUT + PROMPT_SECONDS))


def _knock(crowd, address):
    """Add a silent visitor to the crowd; False if there is no door, or no room before it."""
    visitor = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    visitor.setblocking(False)
    try:
        visitor.connect(address)
    except (BlockingIOError, ConnectionRefusedError):
        return False
    return True


# Ranks that contradict each other


def test_both_sides_hear_that_they_believe_in_different_world_sizes():
    job = uuid.uuid4().hex
    host = Actor("rank 0 of 2", join_and_play, job, 0, 2, TIMEOUT, reduce_until, ())
    guest = Actor("rank 1 of 3", join_and_play, job, 1, 3, TIMEOUT, reduce_until, ())
    try:
        for report in (host.report(), guest.report()):
            _expect_refusal(report)
            assert "Rank 1 believes in a world of 3 ranks, rank 0 in one of 2" in report.message
        assert host.report().missing == (1,)
        assert guest.report().waited < TIMEOUT
    finally:
        host.end()
        guest.end()
    assert_nothing_left(job, set(), [host.pid, guest.pid])


def test_a_second_process_with_the_same_rank_is_turned_away_and_the_world_works():
    with World("processes", 3, reduce_until, "prepared", "return_early", 0, only=[0, 1]) as world:
        _await_joined(world.actors[0], world.actors[1])
        double = Actor("second rank 1", join_and_play, world.job, 1, 3, 20.0, reduce_until, ())
        try:
            report = double.report()
        finally:
            double.end()
        _expect_refusal(report)
        assert "A second process came as rank 1" in report.message
        assert report.waited < PROMPT_SECONDS
        world.start(2)
        world.await_word("fault", 0)  # the healthy part is over
        for report in world.reports(1, 2):
            expect_lost(report, 0)


def test_a_second_rank_zero_is_turned_away_and_the_world_works():
    with World("processes", 3, reduce_until, "prepared", "return_early", 0, only=[0, 1]) as world:
        _await_joined(world.actors[0], world.actors[1])
        double = Actor("second rank 0", join_and_play, world.job, 0, 3, 20.0, reduce_until, ())
        try:
            report = double.report()
        finally:
            double.end()
        _expect_refusal(report)
        assert "job_id" in report.message
        assert report.waited < PROMPT_SECONDS
        world.start(2)
        world.await_word("fault", 0)


def test_a_rank_that_is_none_of_the_world_is_turned_away():
    job = uuid.uuid4().hex
    host = Actor("rank 0 of 2", join_and_play, job, 0, 2, TIMEOUT, reduce_until, ())
    guest = Actor("rank 2 of 3", join_and_play, job, 2, 3, TIMEOUT, reduce_until, ())
    try:
        _expect_refusal(guest.report())
        _expect_deadline(host.report())
    finally:
        host.end()
        guest.end()


# Strangers


@as_root
def test_a_process_of_another_user_is_turned_away_with_nothing_and_the_world_works():
    with World("processes", 2, reduce_until, "prepared", "return_early", 0, only=[0]) as world:
        host = world.actors[0]
        stranger = Actor("stranger", knock_as_another_user, socket_address(world.job), host.pid)
        try:
            knocked = stranger.await_word("knocked")
        finally:
            stranger.end()
        assert not knocked["said"] or "another user" in knocked["said"]
        assert (knocked["fds"], knocked["opened"]) == (0, 0)
        world.start(1)
        world.await_word("fault", 0)
        expect_lost(*world.reports(1), culprit=0)


@as_root
def test_a_rank_tells_nothing_to_another_user_at_its_rendezvous():
    job = uuid.uuid4().hex
    squatter = Actor("squatter", squat_as_another_user, socket_address(job))
    guest = None
    try:
        squatter.await_word("listening")
        host = Actor("rank 0", join_and_play, job, 0, 2, 20.0, reduce_until, ())
        try:
            report = host.report()
            _expect_refusal(report)
            assert f"another user (uid {NOBODY})" in report.message
            assert squatter.await_word("visited") == {"said": "", "fds": 0}
        finally:
            host.end()
        guest = Actor("rank 1", join_and_play, job, 1, 2, 20.0, reduce_until, ())
        report = guest.report()
        _expect_refusal(report)
        assert "another user" in report.message
        assert report.waited < PROMPT_SECONDS
        visited = squatter.await_word("visited")
        assert visited == {"said": "", "fds": 0}
    finally:
        squatter.end()
        if guest is not None:
            guest.end()


# After the end


def test_a_process_that_goes_on_keeps_nothing_of_the_worlds_it_was_in():
    jobs = [uuid.uuid4().hex for _ in range(4)]
    actors = [Actor(f"rank {rank}", live_in_many_worlds, jobs, rank) for rank in range(2)]
    try:
        for actor in actors:
            assert actor.await_word("left")["left"] == [(0, set())] * 4
    finally:
        for actor in actors:
            actor.end()


def test_nothing_is_left_of_a_rendezvous_whose_ranks_are_all_killed():
    with World("processes", 3, reduce_until, "prepared", "go_on", 0, only=[0, 1]) as world:
        _await_joined(world.actors[0], world.actors[1])
        for rank in (0, 1):
            world.actors[rank].signal(signal.SIGKILL)
        assert [world.actors[rank].exitcode for rank in (0, 1)] == [-signal.SIGKILL] * 2
