"""A rank is killed or stopped in the middle of a run of all-reduces: real processes, real signals."""

import signal

import pytest
from acts import ANY_RANK, reduce_until
from culprits import PAYLOADS
from expect import DEATH_SECONDS, PROMPT_SECONDS, expect_lost, expect_timeout
from scenario import NUM_HEALTHY, World

from worlds import pairs

OUTSIDE = ("be_absent", "go_on")  # the signal strikes while the others wait for the culprit, or at any moment


@pairs(place=[(2, 0), (3, 1), (4, 3)], payload=PAYLOADS, moment=OUTSIDE)
def test_every_rank_names_a_killed_rank_within_two_seconds(place, payload, moment):
    _kill_one(*place, payload, moment)


@pytest.mark.slow
@pytest.mark.parametrize("repetition", range(3))
@pytest.mark.parametrize("payload", [*PAYLOADS, "mixed"])
@pytest.mark.parametrize(("world_size", "culprit"), ANY_RANK)
def test_any_rank_may_die_at_any_moment_on_any_path(world_size, culprit, payload, repetition):
    _kill_one(world_size, culprit, payload, "go_on")


def _kill_one(world_size, culprit, payload, moment):
    with World("processes", world_size, reduce_until, payload, moment, culprit) as world:
        world.await_word("ready", *world.others(culprit))
        world.await_word("fault", culprit)
        killed = world.kill(culprit)
        for report in world.reports(*world.others(culprit)):
            expect_lost(report, culprit, number=NUM_HEALTHY + 1 if moment == "be_absent" else None)
            assert report.ended - killed < DEATH_SECONDS
            assert "killed" in report.message


@pytest.mark.parametrize(
    ("world_size", "culprit", "payload", "moment"),
    [
        (2, 0, "prepared", "be_absent"),
        (2, 0, "allocated", "go_on"),
        (2, 1, "staged", "go_on"),
        (3, 0, "prepared", "go_on"),
        (3, 1, "staged", "be_absent"),
        (4, 3, "prepared", "go_on"),
        (4, 1, "allocated", "go_on"),
    ],
)
def test_every_rank_gives_up_on_a_stopped_rank_at_its_deadline(world_size, culprit, payload, moment):
    _stop_one(world_size, culprit, payload, moment, timeout=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("moment", OUTSIDE)
@pytest.mark.parametrize("payload", [*PAYLOADS, "mixed"])
@pytest.mark.parametrize(("world_size", "culprit"), ANY_RANK)
def test_any_rank_may_stop_on_any_path(world_size, culprit, payload, moment):
    _stop_one(world_size, culprit, payload, moment, timeout=1.5)


def _stop_one(world_size, culprit, payload, moment, timeout):
    with World("processes", world_size, reduce_until, payload, moment, culprit, timeout=timeout) as world:
        world.await_word("ready", *world.others(culprit))
        world.await_word("fault", culprit)
        stopped = world.stop(culprit)
        for report in world.reports(*world.others(culprit)):
            expect_timeout(report, culprit, timeout, number=NUM_HEALTHY + 1 if moment == "be_absent" else None)
            assert f"its process (pid {world.actors[culprit].pid}) is stopped" in report.message
            assert report.ended - stopped < timeout + PROMPT_SECONDS


def test_a_rank_that_comes_back_learns_that_the_others_gave_up_on_it():
    with World("processes", 3, reduce_until, "prepared", "go_on", 1, timeout=1.0) as world:
        world.await_word("ready", 0, 2)
        world.await_word("fault", 1)
        world.stop(1)
        for report in world.reports(0, 2):
            expect_timeout(report, 1, 1.0)
        resumed = world.actors[1].signal(signal.SIGCONT)
        (report,) = world.reports(1)
        assert report.kind == "PeerLost"
        assert report.peer in (0, 2)
        assert "raised PeerTimeout" in report.message
        assert report.ended - resumed < PROMPT_SECONDS


@pytest.mark.parametrize(("world_size", "payload"), [(2, "staged"), (3, "allocated"), (4, "prepared")])
def test_nothing_is_left_when_all_ranks_are_killed_at_once(world_size, payload):
    with World("processes", world_size, reduce_until, payload, "go_on", 0) as world:
        world.await_word("ready", *world.others(0))
        world.await_word("fault", 0)
        for actor in world.actors.values():
            actor.signal(signal.SIGSTOP)  # so that none of them ends before its own signal comes
        for actor in world.actors.values():
            actor.signal(signal.SIGKILL)
        assert all(actor.exitcode == -signal.SIGKILL for actor in world.actors.values())
