"""Faults in every other operation: barrier, broadcast, asynchronous all-reduce, messages, channels and subgroups."""

import pytest
from acts import (
    ANY_RANK,
    collective_against_message,
    disagree_on_a_channel,
    exchange_misfits,
    fail_beside_an_operation,
    leave_before_channel,
    operate_until,
    reduce_in_subgroup,
    reduce_on_channel,
)
from culprits import LARGE, SMALL
from expect import DEATH_SECONDS, PROMPT_SECONDS, expect_lost, expect_mismatch, expect_timeout
from operations import OPERATIONS
from scenario import NUM_HEALTHY, World

KINDS = ("threads", "processes")


def _name(operation):
    """What errors call the operation."""
    if operation.split()[-1] in ("ring", "sends", "recvs"):
        return "exchange"
    return "broadcast" if "broadcast" in operation else operation.split()[-1]


# One rank is lost


@pytest.mark.parametrize(
    ("operation", "world_size", "moment"),
    [
        ("barrier", 2, "be_absent"),
        ("barrier", 3, "go_on"),
        ("small broadcast", 3, "be_absent"),
        ("staged broadcast", 3, "go_on"),
        ("staged broadcast from rank 1", 3, "go_on"),
        ("allocated broadcast", 2, "be_absent"),
        ("small async all_reduce", 3, "be_absent"),
        ("large async all_reduce", 2, "go_on"),
        ("small ring", 4, "be_absent"),
        ("large ring", 2, "go_on"),
        ("sends", 3, "be_absent"),
        ("large sends", 2, "go_on"),
        ("recvs", 3, "be_absent"),
        ("reduce", 3, "go_on"),
        ("reduce_scatter", 3, "go_on"),
        ("all_gather", 3, "go_on"),
        ("gather", 3, "go_on"),
        ("scatter", 3, "go_on"),
        ("all_to_all", 3, "go_on"),
    ],
)
def test_a_killed_rank_is_named_within_two_seconds(operation, world_size, moment):
    _kill_one(world_size, 1, operation, moment)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["be_absent", "go_on"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("world_size", "culprit"), ANY_RANK)
def test_any_rank_may_be_killed_in_any_operation(world_size, culprit, operation, moment):
    _kill_one(world_size, culprit, operation, moment)


def _kill_one(world_size, culprit, operation, moment):
    with World("processes", world_size, operate_until, operation, moment, culprit) as world:
        world.await_word("ready", *world.others(culprit))
        world.await_word("fault", culprit)
        killed = world.kill(culprit)
        for report in world.reports(*world.others(culprit)):
            expect_lost(report, culprit, _name(operation))
            assert report.ended - killed < DEATH_SECONDS


@pytest.mark.parametrize(
    "operation", ["barrier", "small broadcast from rank 1", "small async all_reduce", "small ring", "sends", "recvs"]
)
def test_threads_name_a_rank_that_raises_with_its_story(operation):
    _let_one_raise("threads", 3, 1, operation)


@pytest.mark.parametrize(
    "operation", ["barrier", "staged broadcast", "small async all_reduce", "large ring", "sends", "recvs"]
)
def test_processes_name_a_rank_that_raises_with_its_story(operation):
    _let_one_raise("processes", 2, 0, operation)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("world_size", "culprit"), ANY_RANK)
def test_any_rank_may_raise_in_any_operation(kind, world_size, culprit, operation):
    _let_one_raise(kind, world_size, culprit, operation)


def _let_one_raise(kind, world_size, culprit, operation):
    with World(kind, world_size, operate_until, operation, "raise_error", culprit) as world:
        fired = world.actors[culprit].await_word("fault")["at"]
        for report in world.reports(*world.others(culprit)):
            expect_lost(report, culprit, _name(operation))
            assert "raised ValueError: the loader broke" in report.message
            assert report.ended - fired < DEATH_SECONDS


@pytest.mark.parametrize(
    ("operation", "world_size"),
    [
        ("barrier", 3),
        ("staged broadcast from rank 1", 3),
        ("small async all_reduce", 3),
        ("sends", 2),
        pytest.param("large ring", 3, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_rank_is_named_at_the_deadline(operation, world_size):
    timeout, culprit = 1.0, 1
    with World("processes", world_size, operate_until, operation, "go_on", culprit, timeout=timeout) as world:
        world.await_word("ready", *world.others(culprit))
        world.await_word("fault", culprit)
        world.stop(culprit)
        for report in world.reports(*world.others(culprit)):
            expect_timeout(report, culprit, timeout, _name(operation))
            assert "is stopped" in report.message


@pytest.mark.parametrize("operation", ["barrier", "small async all_reduce", "small ring"])
def test_threads_name_a_rank_that_does_not_come_at_the_deadline(operation):
    with World("threads", 3, operate_until, operation, "be_absent", 1, timeout=1.0) as world:
        for report in world.reports(0, 2):
            expect_timeout(report, 1, 1.0, _name(operation))


# Messages that do not fit


@pytest.mark.parametrize("side", ["sent", "expected"])
@pytest.mark.parametrize(("what", "numel"), [("length", SMALL), ("length", LARGE), ("dtype", SMALL), ("shape", SMALL)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_of_another_kind_is_refused_on_both_sides(kind, what, side, numel):
    expected = {
        "length": f"float32[{numel + 1}]",
        "dtype": f"int32[{numel}]",
        "shape": f"float32[2, {numel // 2}]",
    }[what]
    calls = {0: f"send(dst=1) of float32[{numel}]", 1: f"recv(src=0) of {expected}"}
    if side == "sent":
        calls = {0: f"recv(src=1) of float32[{numel}]", 1: f"send(dst=0) of {expected}"}
    with World(kind, 2, exchange_misfits, f"{what} {side}", numel) as world:
        for report in world.reports():
            expect_mismatch(report, calls)
            assert report.waited < PROMPT_SECONDS


@pytest.mark.parametrize(
    ("message", "world_size", "numel"),
    [("recv", 3, SMALL), ("send", 3, SMALL), ("exchange", 3, SMALL), ("exchange", 2, LARGE)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_against_a_message_is_a_mismatch_on_every_rank(kind, world_size, numel, message):
    culprit = world_size - 1
    with World(kind, world_size, collective_against_message, message, numel, culprit) as world:
        for report in world.reports():
            assert report.kind == "CollectiveMismatch", report
            assert "all_reduce" in report.calls[culprit] or "collective" in report.calls[culprit]
            assert any("exchange" in call for rank, call in report.calls.items() if rank != culprit)
            assert report.waited < PROMPT_SECONDS


# Beside an operation under way


@pytest.mark.slow
def test_a_rank_may_fail_while_its_communication_thread_waits():
    with World("processes", 2, fail_beside_an_operation, 3000) as world:
        for report in world.reports():
            assert (report.kind, report.result) == ("", []), report


# Channels and subgroups


@pytest.mark.parametrize("moment", ["be_absent", "go_on"])
def test_a_killed_rank_is_named_on_a_channel(moment):
    with World("processes", 3, reduce_on_channel, moment, 1) as world:
        world.await_word("ready", 0, 2)
        world.await_word("fault", 1)
        killed = world.kill(1)
        for report in world.reports(0, 2):
            expect_lost(report, 1)
            assert report.ended - killed < DEATH_SECONDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_raises_is_named_on_a_channel(kind):
    with World(kind, 3, reduce_on_channel, "raise_error", 1) as world:
        for report in world.reports(0, 2):
            expect_lost(report, 1, number=NUM_HEALTHY + 1)
            assert "ValueError: the loader broke" in report.message
            assert report.waited < DEATH_SECONDS


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_rank_that_raised_before_the_channel_is_named_on_it(kind):
    with World(kind, 3, leave_before_channel, 1, timeout=3.0) as world:
        for report in world.reports(0, 2):
            assert (report.kind, report.peer) == ("PeerLost", 1), report
            assert "ValueError: the loader broke" in report.message
            assert report.waited < DEATH_SECONDS


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_split_off_different_channels_get_the_table_and_lose_the_world(kind):
    with World(kind, 2, disagree_on_a_channel, timeout=1.0) as world:
        for report in world.reports():
            assert report.kind == "CollectiveMismatch", report
            assert sorted(report.calls) == [0, 1]
            assert {again.kind for again in report.later} == {"CollectiveMismatch"}


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_disagree_on_a_channel_get_the_table(kind):
    with World(kind, 3, reduce_on_channel, "pass_other_op", 1) as world:
        for report in world.reports():
            expect_mismatch(report, {rank: f"all_reduce({'max' if rank == 1 else 'sum'})" for rank in range(3)})


def test_a_killed_rank_of_a_subgroup_is_named_by_its_number_in_the_world():
    members, culprit = (3, 1, 2), 2
    with World("processes", 4, reduce_in_subgroup, members, "be_absent", culprit) as world:
        world.await_word("ready", *world.others(culprit))
        world.await_word("fault", culprit)
        killed = world.kill(culprit)
        for rank in (3, 1):
            (report,) = world.reports(rank)
            expect_lost(report, culprit, number=NUM_HEALTHY + 1)
            assert report.ended - killed < DEATH_SECONDS
        # The rank outside waited for none of them, and nothing happened to it.
        world.actors[0].say("well?")
        (outsider,) = world.reports(0)
        assert (outsider.kind, outsider.result) == ("", "well?")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_of_a_subgroup_that_raises_is_named_by_its_number_in_the_world(kind):
    members, culprit = (2, 0, 3), 0
    with World(kind, 4, reduce_in_subgroup, members, "raise_error", culprit) as world:
        for rank in (2, 3):
            expect_lost(*world.reports(rank), culprit=culprit, number=NUM_HEALTHY + 1)
        world.actors[1].say("well?")
        assert world.reports(1)[0].kind == ""
