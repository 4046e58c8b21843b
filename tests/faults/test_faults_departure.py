"""A rank raises, returns early or exits in the middle of a run of all-reduces: the others hear why, at once."""

import pytest
from acts import ANY_RANK, reduce_until
from culprits import PAYLOADS
from expect import DEATH_SECONDS, expect_lost
from scenario import NUM_HEALTHY, World
from traces import is_gone

from contracts.grids import grid

STORIES = {
    "raise_error": "raised ValueError: the loader broke",
    "return_early": "closed its transport and left, without an error. Does every rank call this?",
    "close_and_stay": "closed its transport and left, without an error. Does every rank call this?",
    "fail_and_stay": "raised ValueError: the loader broke",
    "sys_exit": "raised SystemExit: 7",
    "sys_exit_unclosed": "exited without closing",
    "os_exit": "exited without closing",
}
STATUS = 7  # of the processes that exit
OF_THREADS = ("raise_error", "return_early", "sys_exit", "close_and_stay")  # a thread that does not close is not seen
WORLDS = [(2, 1, "prepared"), (3, 0, "allocated"), (3, 2, "staged"), (4, 2, "prepared")]


@pytest.mark.parametrize("fault", OF_THREADS)
@pytest.mark.parametrize(("world_size", "culprit", "payload"), [(2, 1, "prepared"), (4, 2, "staged")])
def test_threads_name_the_rank_that_left_and_tell_its_story(world_size, culprit, payload, fault):
    _let_one_leave("threads", world_size, culprit, payload, fault)


@grid("where, fault", WORLDS, [*STORIES], sample=2)
def test_processes_name_the_rank_that_left_and_tell_its_story(where, fault):
    _let_one_leave("processes", *where, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", STORIES)
@pytest.mark.parametrize("payload", [*PAYLOADS, "mixed"])
@pytest.mark.parametrize(("world_size", "culprit"), ANY_RANK)
def test_any_rank_may_leave_on_any_path(world_size, culprit, payload, fault):
    _let_one_leave("processes", world_size, culprit, payload, fault)


def _let_one_leave(kind, world_size, culprit, payload, fault):
    with World(kind, world_size, reduce_until, payload, fault, culprit) as world:
        fired = world.actors[culprit].await_word("fault")["at"]
        for report in world.reports(*world.others(culprit)):
            expect_lost(report, culprit, number=NUM_HEALTHY + 1)
            assert STORIES[fault] in report.message
            assert report.ended - fired < DEATH_SECONDS
        if kind == "processes" and "exit" in fault:
            assert world.actors[culprit].exitcode == STATUS
        if kind == "processes" and "stay" in fault:
            assert not is_gone(world.actors[culprit].pid)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_story_too_long_to_tell_is_told_in_part(kind):
    with World(kind, 3, reduce_until, "prepared", "raise_long_story", 1) as world:
        for report in world.reports(0, 2):
            assert (report.kind, report.peer) == ("PeerLost", 1)
            assert "raised ValueError: the loader broke: ĝŝĝŝ" in report.message
            assert report.message.endswith("start the world anew.")


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_an_error_that_cannot_be_told_is_an_end_like_any_other(kind):
    with World(kind, 3, reduce_until, "prepared", "raise_without_words", 1, timeout=3.0) as world:
        fired = world.actors[1].await_word("fault")["at"]
        for report in world.reports(0, 2):
            expect_lost(report, 1, number=NUM_HEALTHY + 1)
            assert report.ended - fired < DEATH_SECONDS
